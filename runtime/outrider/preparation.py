"""Makes requests for the loop from prompts and options."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.controller import ConfidenceThreshold
from outrider.errors import OptionError
from outrider.request import Request
from outrider.sampling import LogitsSampler
from outrider.text import TextStream
from outrider.types import NO_PROMPT, Noise, Prompt, Sequence
from outrider.verifiers import SAMPLING_VERIFIERS, Greedy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq
    from threading import Event
    from typing import Any, TypeAlias

    from outrider.admission import Admission
    from outrider.bundle.manifest import TokenizerEntry
    from outrider.config import GenerationConfig
    from outrider.drafter_registry import DrafterRegistry
    from outrider.drafters import AnswerStore
    from outrider.loading import LoadedModel
    from outrider.types import TextTokenizer, Verifier

    AnyPrompt: TypeAlias = str | Seq[Mapping[str, Any]] | Seq[int] | Prompt


@dataclass(frozen=True, slots=True)
class Preparation:
    """Checks a prompt and its options, and makes a request.

        request = preparation.request("Why is the sky blue?", config)

    loaded: the models by role, including "main". special: the bundle's special tokens. store: where answers are stored.
    reuse: whether requests start from cached prefixes and publish their own.
    """

    loaded: Mapping[str, LoadedModel]
    tokenizer: TextTokenizer
    special: TokenizerEntry
    admission: Admission
    registry: DrafterRegistry
    store: AnswerStore | None = None
    reuse: bool = True

    def request(
        self,
        prompt: AnyPrompt,
        config: GenerationConfig,
        *,
        chat_template: bool = True,
        cancel: Event | None = None,
        at_once: bool = False,
        overlaps: bool = False,
    ) -> Request:
        """Make a request. at_once: its text is only read at the end. overlaps: draft models draft ahead.

        Raises:
            OptionError: for a bad value, or one that does not fit the model or the drafter.
            RequestError: when the prompt cannot be tokenized, or does not fit.
        """
        created = time.perf_counter()
        if cancel is not None and (isinstance(cancel, type) or not callable(getattr(cancel, "is_set", None))):
            raise OptionError(f"cancel={cancel!r} has no is_set() to ask. Pass a threading.Event.")
        whole = prompt if isinstance(prompt, Prompt) else NO_PROMPT
        whole.check_tokens(self.loaded["main"].backend)
        text = prompt.token_ids if isinstance(prompt, Prompt) else prompt
        token_ids = list(map(int, self.tokenizer.encode_prompt(text, chat_template=chat_template)))
        max_new_tokens = self.admission.check(token_ids, config)
        policy, num_assistant_tokens = self.registry.policy_for(config)
        threshold = config.assistant_confidence_threshold
        seed = secrets.randbits(63) if config.seed is None else config.seed
        eos_token_ids = () if config.ignore_eos else self.special.eos_token_ids
        end_token_ids = frozenset(config.stop_token_ids).union(eos_token_ids)
        request = Request(
            sequence=Sequence(
                token_ids,
                len(token_ids),
                self.registry.texts(config, policy),
                scope=whole.scope,
                answers=whole.answers,
            ),
            sampler=LogitsSampler(config, token_ids, end_token_ids=end_token_ids),
            verifier=_verifier(config),
            noise=Noise(seed),
            text=TextStream(self.tokenizer.decode, config.stop, at_once=at_once),
            max_new_tokens=max_new_tokens,
            eos_token_ids=end_token_ids,
            policy=policy,
            sampled=config.temperature > 0,
            exact=self.loaded["main"].backend.capabilities.bit_exact_batching and config.sampling_is_invariant,
            num_assistant_tokens=num_assistant_tokens,
            ahead=overlaps and policy is not None and policy.goes_ahead,
            rule=None if threshold is None else ConfidenceThreshold(threshold),
            logprobs=None if config.logprobs is None else [],
            cancel=cancel,
            save=self.store.add if self.store else None,
            reuse=self.reuse,
            created=created,
        )
        request.stats.num_prompt_tokens = len(token_ids)
        return request


def _verifier(config: GenerationConfig) -> Verifier:
    if not config.temperature:
        return Greedy()
    options = {} if config.acceptance_threshold is None else {"threshold": config.acceptance_threshold}
    return SAMPLING_VERIFIERS[config.sampling](**options)
