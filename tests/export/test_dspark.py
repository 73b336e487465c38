"""DSpark and DFlash 2 draft what their published forms do, step by step over the whole vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

import outrider
from heads import DSPARKS, GROUP, MASK, NUM_PLACES, TOKENS, TOP_K, WINDOW, config_of, name_of, tensors_of, write_head
from outrider.bundle import Bundle, read_bundle
from outrider.bundle.manifest import Geometry
from outrider.drafters import HiddenModel, MarkovHead, Subset, markov
from outrider.errors import ExportError
from outrider.models.backends.heads import Head, load_head
from outrider.tokens.sampling import LogitsSampler
from outrider.tokens.verifiers import BlockRejection, Greedy
from outrider.types import Committed, DraftRequest, Noise, TokenSequence
from outrider_export.bundles.drafters import add_drafter
from outrider_export.heads.formats import read_head

MAIN = Geometry("qwen2", 2, 4, 2, 16, 64, 512, 448)
FORMS = [kind.removeprefix("dspark").strip() or "vanilla" for kind in DSPARKS]


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle with a drafter of each form, in fp32."""
    root = tmp_path_factory.mktemp("dspark")
    shutil.copytree(tiny, root / "bundle")
    for kind in DSPARKS:
        add_drafter(root / "bundle", write_head(root / name_of(kind), kind), name=name_of(kind), weights="fp32")
    cut = root / name_of("dspark rnn")
    return add_drafter(root / "bundle", cut, name="cut", weights="fp32", draft_vocab=300)


class Reference:
    """The published drafter, on whole matrices."""

    def __init__(self, kind: str, shared: tuple[Any, Any]) -> None:
        self.config, (self.embedding, self.matrix) = config_of(kind), shared
        self.weights = {name: torch.tensor(values) for name, values in tensors_of(kind).items()}
        self.is_gemma = self.config["architectures"] == ["Gemma4DSparkModel"]
        self.has_neighbours = not self.config.get("rope_is_neox_style", True)
        self.own = self.config.get("dflash_config", {}) if kind.startswith("dflash2") else {}
        self.size = self.config.get("global_head_dim") or self.config["head_dim"]

    def norm(self, rows: Any, name: str | None) -> Any:
        rows = rows / (rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return rows if name is None else rows * self.weights[f"{name}.weight"]

    def linear(self, rows: Any, name: str) -> Any:
        return rows @ self.weights[f"{name}.weight"].T

    def turn(self, heads: Any, first: int) -> Any:
        """Rotary embeddings of heads [n, heads, size]. In Gemma's, a quarter of the waves turn."""
        waves = 10_000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        if self.is_gemma:
            waves[self.size // 8 :] = 0
        angles = (torch.arange(len(heads)) + first)[:, None] * torch.cat([waves, waves])
        half = self.size // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        if self.has_neighbours:
            angles = (torch.arange(len(heads)) + first)[:, None] * waves.repeat_interleave(2)
            turned = torch.stack([-heads[..., 1::2], heads[..., ::2]], -1).flatten(-2)
        return heads * angles.cos()[:, None] + turned * angles.sin()[:, None]

    def attend(self, name: str, context: Any, rows: Any) -> Any:
        queries = self.norm(self.linear(rows, f"{name}.q_proj").unflatten(-1, (-1, self.size)), f"{name}.q_norm")
        both = torch.cat([context, rows])
        keys = self.linear(both, f"{name}.k_proj").unflatten(-1, (-1, self.size))
        values = keys if self.is_gemma else self.linear(both, f"{name}.v_proj").unflatten(-1, (-1, self.size))
        values = self.norm(values, None) if self.is_gemma else values
        keys = self.turn(self.norm(keys, f"{name}.k_norm"), 0)
        queries = self.turn(queries, len(context))
        times = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(times, 1).transpose(0, 1) for each in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * (1 if self.is_gemma else self.size**-0.5)
        if self.own and name.startswith("layers.0."):
            ages = torch.arange(len(context), len(both))[:, None] - torch.arange(len(both))
            scores = scores.masked_fill(ages >= WINDOW, -torch.inf)
        return self.linear((scores.softmax(-1) @ values).transpose(0, 1).flatten(1), f"{name}.o_proj")

    def hidden(self, states: Any, newest: int) -> Any:
        """Hidden states of a block, float32 [places, hidden]. states: of the context, float32 [n, 2 · hidden]."""
        context = self.norm(self.linear(states, "fc"), "hidden_norm")
        rows = self.embedding[[newest, *[MASK] * (NUM_PLACES - (not self.own))]]
        rows = rows * self.own.get("input_embedding_scale", 1)
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            normed, kernel = self.convolve(f"{layer}.attention_conv", self.norm(rows, f"{layer}.input_layernorm"))
            made = self.attend(f"{layer}.self_attn", context, normed)
            made, _ = self.convolve(f"{layer}.attention_conv", made, kernel)
            after = f"{layer}.post_attention_layernorm"
            rows = rows + (self.norm(made, after) if self.is_gemma else made)
            normed = self.norm(rows, f"{layer}.pre_feedforward_layernorm" if self.is_gemma else after)
            normed, kernel = self.convolve(f"{layer}.mlp_conv", normed)
            gate = self.linear(normed, f"{layer}.mlp.gate_proj")
            gate = gelu(gate, approximate="tanh") if self.is_gemma else silu(gate)
            made = self.linear(gate * self.linear(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
            made, _ = self.convolve(f"{layer}.mlp_conv", made, kernel)
            rows = rows + (self.norm(made, f"{layer}.post_feedforward_layernorm") if self.is_gemma else made)
            rows = rows * self.weights.get(f"{layer}.layer_scalar", 1)
        return self.norm(rows, "norm")[1 if self.own else 0 :]

    def convolve(self, name: str, rows: Any, kernel: Any = None) -> tuple[Any, Any]:
        """DFlash 2's convolution in front of a part, or after it with the kernel that the first has made."""
        if not self.own:
            return rows, None
        fixed = self.weights[f"{name}.base_kernel"]
        taps, side = fixed.shape[1], 0 if kernel is None else 1
        if kernel is None:
            kernel = self.linear(rows, f"{name}.kernel_projection").reshape(len(rows), 2, taps, -1)
        made = torch.zeros_like(rows)
        for place in range(len(rows)):
            for tap in range(min(taps, place + 1)):
                own = kernel[place, side, tap].repeat_interleave(GROUP)
                made[place] += (fixed[side, tap] + own) * rows[place - tap]
        return made, kernel

    def selected(self, place: Any, logits: Any, before: int) -> Any:
        """The logits of a place's likeliest tokens, corrected by the token before; −inf for the others."""
        books = [self.weights[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")]
        logits = logits * self.own.get("output_multiplier", 1)
        if cap := self.own.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        kept = torch.topk(logits[:TOKENS], TOP_K).indices
        made = torch.full_like(logits, -torch.inf)
        edge = books[0][before] * self.linear(place, "candidate_selector.hidden_projection")
        made[kept] = logits[kept] + books[1][kept] @ edge
        return made

    def rows(self, states: Any, newest: int, choose: Any) -> tuple[list[Any], list[float]]:
        """Corrected logits of each place, and the chances. choose: takes a place's token from its logits."""
        hidden, made, chances = self.hidden(states, newest), [], []
        cap, before, weights = self.config.get("final_logit_softcapping"), newest, self.weights
        state = torch.zeros(self.config.get("markov_rank", 0))
        for place in hidden:
            logits = self.matrix @ place
            if self.own:
                made.append(self.selected(place, logits, before)[:TOKENS].numpy())
                before = int(choose(made[-1]))
                continue
            logits = cap * torch.tanh(logits / cap) if cap else logits
            embedded = torch.zeros(0)
            if self.config["markov_rank"]:
                embedded = weights["markov_head.markov_w1.weight"][before]
                latent = embedded
                if self.config["markov_head_type"] == "gated":
                    gate = self.linear(torch.cat([place, embedded]), "markov_head.gate_proj")
                    latent = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * embedded
                if self.config["markov_head_type"] == "rnn":
                    joint = self.linear(torch.cat([state, embedded, place]), "markov_head.joint_proj")
                    gate, new, out = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
                    state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                    latent = torch.tanh(out)
                logits = logits + weights["markov_head.markov_w2.weight"] @ latent
            if self.config["enable_confidence_head"]:
                reads_more = self.config.get("confidence_head_with_markov", True)
                read = torch.cat([place, embedded]) if reads_more else place
                chance = self.linear(read, "confidence_head.proj") + weights["confidence_head.proj.bias"]
                chances.append(torch.sigmoid(chance).item())
            made.append(logits[:TOKENS].numpy())
            before = int(choose(made[-1]))
        return made, chances


class Rule:
    """Wants all tokens, so that confidences are kept."""

    wants_branches = False

    def wants_more(self, confidences: Any) -> bool:
        return True

    def branch_places(self, confidences: Any) -> list[int]:
        return []


def drafter_of(bundle: Bundle, name: str) -> HiddenModel:
    entry = next(each for each in bundle.manifest.drafters if each.name == name)
    path, width = bundle.model_path(entry.model), min(TOKENS, entry.model.geometry.logits_width)
    head = Head.of(entry, bundle.model_path(bundle.manifest.main))
    properties = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    backend = load_head(
        path, head, {"device": "CPU", "precision": "f32", "vocab_size": width, "properties": properties}
    )
    backend.allocate(1024)
    subset = Subset(bundle.read_proposed(entry), TOKENS) if entry.num_proposed_tokens else None
    own = MarkovHead.read(path, subset, TOKENS)
    return HiddenModel.block(backend, entry.features, [MASK] * NUM_PLACES, own, context_length=500)


def drafts_of(drafter: HiddenModel, states: Any, token_ids: list[int], verifier: Any, temperature: float = 0) -> Any:
    """A draft after some tokens, whose hidden states are read in two parts, for two sequences in one call."""
    requests = []
    for _ in range(2):
        sequence = TokenSequence([*token_ids], len(token_ids))
        config = outrider.GenerationConfig(temperature=temperature, seed=1)
        sampler = LogitsSampler(config, token_ids)
        assert drafter.reserve(sequence, 200)
        for part in (states[:7], states[7:]):
            drafter.observe(sequence, Committed([], [], features=part))
        requests.append(DraftRequest(sequence, NUM_PLACES, sampler, verifier, Noise(3), frozenset(), rule=Rule()))
    first, second = drafter.propose(requests)
    assert (first.token_ids, first.confidences) == (second.token_ids, second.confidences)
    for request in requests:
        drafter.release(request.sequence)
    return first


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DSPARKS, ids=FORMS)
def test_drafts_are_those_of_the_published_form(kind: str, bundle: Bundle, shared: Any) -> None:
    reference, drafter = Reference(kind, shared), drafter_of(bundle, name_of(kind))
    rng, changed = np.random.default_rng(2), 0
    for count in (12, 13, 40):
        states = rng.standard_normal((count, 128)).astype(np.float32)
        token_ids = rng.integers(0, TOKENS, count + 1).tolist()
        expected, chances = reference.rows(torch.tensor(states), token_ids[-1], np.argmax)
        draft = drafts_of(drafter, states, token_ids, Greedy())
        assert draft.token_ids == [row.argmax() for row in expected]
        softmax = [np.exp(row.max() - np.logaddexp.reduce(row.astype(np.float64))) for row in expected]
        np.testing.assert_allclose(draft.confidences, chances or softmax, rtol=2e-3)
        uncorrected = (reference.hidden(torch.tensor(states), token_ids[-1]) @ shared[1].T)[:, :TOKENS].argmax(-1)
        changed += draft.token_ids != uncorrected.tolist()
    assert bool(changed) == (kind != "dspark plain")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", DSPARKS, ids=FORMS)
def test_draft_probs_are_the_corrected_ones(kind: str, bundle: Bundle, shared: Any) -> None:
    """Each place's, after the tokens that were drawn before."""
    reference, drafter = Reference(kind, shared), drafter_of(bundle, name_of(kind))
    rng = np.random.default_rng(3)
    states = rng.standard_normal((20, 128)).astype(np.float32)
    token_ids = rng.integers(0, TOKENS, 21).tolist()
    draft = drafts_of(drafter, states, token_ids, BlockRejection(), temperature=0.7)
    drawn = iter(draft.token_ids)
    expected, _ = reference.rows(torch.tensor(states), token_ids[-1], lambda _: next(drawn))
    for probs, row in zip(draft.probs, expected, strict=True):
        whole = np.zeros(TOKENS)
        whole[probs.token_ids] = probs.probs
        np.testing.assert_allclose(whole, torch.softmax(torch.tensor(row) / 0.7, 0).numpy(), atol=2e-3)


def test_a_cut_vocabulary_is_one_of_three_matrices(bundle: Bundle, shared: Any) -> None:
    """Of the output matrix, W1 and W2. W1's row for all other tokens is their mean."""
    reference, drafter = Reference("dspark rnn", shared), drafter_of(bundle, "cut")
    entry = bundle.manifest.drafters[-1]
    proposed, rng = bundle.read_proposed(entry), np.random.default_rng(4)
    others = np.setdiff1d(np.arange(TOKENS), proposed)
    before = reference.weights["markov_head.markov_w1.weight"]
    before[others] = before[others].mean(0)
    for newest in (int(proposed[5]), int(others[5])):
        states = rng.standard_normal((20, 128)).astype(np.float32)
        token_ids = [*rng.integers(0, TOKENS, 20).tolist(), newest]
        expected, chances = reference.rows(torch.tensor(states), newest, lambda row: proposed[np.argmax(row[proposed])])
        draft = drafts_of(drafter, states, token_ids, Greedy())
        assert draft.token_ids == [proposed[row[proposed].argmax()] for row in expected]
        np.testing.assert_allclose(draft.confidences, chances, rtol=2e-3)


def test_it_proposes_the_tokens_that_it_was_trained_for(folder: Path, tmp_path: Path) -> None:
    token_ids = sorted({*range(0, TOKENS, 2), *range(8)})
    head = write_head(tmp_path / "head", "dspark")
    (head / "draft_vocab.json").write_text(json.dumps({"token_ids": token_ids}), encoding="utf-8")
    for name, asked in (("trained", None), ("all", "all"), ("fewer", 100)):
        bundle = add_drafter(folder, head, name=name, draft_vocab=asked)
        proposed = bundle.read_proposed(bundle.manifest.drafters[-1]).tolist()
        assert proposed == token_ids if asked != 100 else len(proposed) == 100 and {*proposed} <= {*token_ids}


def test_the_likeliest_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least as many as asked for, ascending, and all others are smaller."""
    monkeypatch.setattr(markov, "NUM_CANDIDATES", 8)
    rng = np.random.default_rng(0)
    for size in (5, 200, 256, 300, 4001):
        logits = rng.standard_normal(size).astype(np.float32)
        found, values = markov._likeliest(outrider.types.LogitsRow.of(logits))
        np.testing.assert_array_equal(values, logits[found])
        assert (np.diff(found) > 0).all()
        assert min(8, size) <= len(found) <= (size if size < 256 else 40)
        assert np.delete(logits, found).max(initial=-np.inf) < values.min()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such head": ({"markov_head_type": "lstm"}, "markov_head_type 'lstm', and known are vanilla, gated, rnn"),
    "another head": ({"markov_head_type": "gated"}, "'markov_head.gate_proj.weight' is missing, and has to be"),
    "another rank": ({"markov_rank": 9}, r"'markov_head.markov_w1.weight' is float32 \[448, 8\], and has to be"),
    "another confidence": ({"confidence_head_with_markov": False}, r"'confidence_head.proj.weight' is float32 \[1, 72"),
    "another place": ({"sample_from_anchor": False}, "sample_from_anchor false, and only blocks whose newest token"),
    "no mask": ({"mask_token_id": None}, "config.json has no 'mask_token_id', which dspark drafters have"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    changes, said = WRONG[case]
    with pytest.raises(ExportError, match=said):
        add_drafter(folder, write_head(tmp_path / "head", "dspark", **changes))
    assert not read_bundle(folder).manifest.drafters


def test_spec_forge_s_has_other_names(tmp_path: Path) -> None:
    """Settings one level deeper, no copies of the main model's matrices, and earlier a part in front of the heads'."""
    config = config_of("dspark")
    deeper = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "confidence_head_with_markov")
    own = {name: config[name] for name in deeper} | {"projector_type": "dspark", "confidence_head_alpha": 1.0}
    changes: dict[str, Any] = dict.fromkeys((*deeper, "enable_confidence_head"))
    changes |= {"architectures": ["DSparkDraftModel"], "dflash_config": own}
    tensors = {
        f"logit_head.{name}" if "_head." in name and i % 2 else name: each
        for i, (name, each) in enumerate(tensors_of("dspark").items())
        if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    found = read_head(write_head(tmp_path / "theirs", "dspark", tensors, **changes), MAIN)
    expected = read_head(write_head(tmp_path / "ours", "dspark"), MAIN)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.tensors[name], values) for name, values in expected.tensors.items())
    for name in ("kind", "features", "num_places", "mask_token_id", "numbers"):
        assert getattr(found, name) == getattr(expected, name)


def test_a_smaller_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = tensors_of("dspark")
    tensors |= {f"markov_head.markov_w{i}.weight": tensors[f"markov_head.markov_w{i}.weight"][:300] for i in (1, 2)}
    with pytest.raises(ExportError, match="Markov head has 300 tokens, and the main model has 404"):
        add_drafter(folder, write_head(tmp_path / "head", "dspark", tensors, vocab_size=300))


WRONG_SELECTORS: dict[str, tuple[dict[str, Any], str]] = {
    "groups that do not fit": ({"conv_group_size": 24}, "conv_group_size 24: .* has to divide hidden_size 64"),
    "no rank": ({"selector_rank": None}, "config.json has no 'selector_rank', which dflash2 drafters have"),
    "another rank": ({"selector_rank": 9}, r"predecessor_codebook' is float32 \[448, 8\], .* \[448, 9\]"),
    "another number of taps": ({"conv_kernel_size": 3}, r"base_kernel' is float32 \[2, 2, 64\], .* \[2, 3, 64\]"),
    "blocks that see no later token": ({"is_causal": True}, "is_causal true, and only blocks whose tokens all"),
}


@pytest.mark.parametrize("case", WRONG_SELECTORS)
def test_a_selector_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    changes, said = WRONG_SELECTORS[case]
    whole = config_of("dflash2")["dflash_config"] | changes
    own = {name: value for name, value in whole.items() if value is not None}
    with pytest.raises(ExportError, match=said):
        read_head(write_head(tmp_path, "dflash2", dflash_config=own), MAIN)
