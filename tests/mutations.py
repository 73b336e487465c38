"""Breaks the loop in one place after the other, and shows that a test fails for each.

    python tests/mutations.py [NAME …]

Works on a copy. Prints a table of what was broken and which test noticed; exits with 1 if one went unnoticed. Takes
some minutes, so it is run by hand when the loop, the verifiers, the sampling or the drafters change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIME = Path("runtime/outrider")


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands in `path` once, becomes `new`; one of `tests` must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "trees: a branch has no copy of the text's last block",
        "backends/paged_cache.py",
        "            if begin % size:\n",
        "            if False:\n",
        "test_tree_calls.py",
    ),
    Mutation(
        "trees: the accepted branch's blocks are not kept",
        "backends/paged_cache.py",
        "        if at:\n            self._taken",
        "        if False:\n            self._taken",
        "test_tree_calls.py",
    ),
    Mutation(
        "trees: blocks of branches are not given back",
        "backends/paged_cache.py",
        "            self._table.give(numbers)",
        "            pass",
        "test_tree_calls.py",
    ),
    Mutation(
        "trees: a branch reads the text's own blocks",
        "backends/paged_call.py",
        "(chunk.slot.blocks, *chunk.slot.branch_blocks)",
        "[chunk.slot.blocks] * (1 + len(chunk.slot.branch_blocks))",
        "test_tree_calls.py",
    ),
    Mutation(
        "suffix automaton: a part that parts from longer ones begins with their count",
        "drafters/suffix_automaton.py",
        "length[at] + 1, self._count[longer])",
        "length[at] + 1, 0)",
        "test_suffix.py",
    ),
    Mutation(
        "suffix automaton: a copy that has come around goes on",
        "drafters/suffix_automaton.py",
        "if state == self._whole:",
        "if False:",
        "test_suffix.py",
    ),
    Mutation(
        "references: nothing is copied across documents",
        "drafters/references.py",
        "positions = positions[self._text[positions - 1] != _SEPARATOR]",
        "",
        "test_suffix.py",
    ),
    Mutation(
        "suffix: nothing unverified is indexed",
        "drafters/suffix.py",
        "self._match = self._index.walk(self._match, token_id)",
        "self._index.append(token_id)",
        "test_suffix.py",
    ),
    Mutation(
        "answer store: what a crash left half written stays",
        "drafters/store.py",
        'database.execute("BEGIN IMMEDIATE")',
        "",
        "test_store.py",
    ),
    Mutation(
        "acceptance rule, token by token",
        "verifiers/rejection.py",
        "if uniforms[i] * drafted.prob(token_id) < target.prob(token_id):",
        "if 0.9 * uniforms[i] * drafted.prob(token_id) < target.prob(token_id):",
        "test_verifiers.py",
    ),
    Mutation(
        "acceptance rule, block: what was spared is forgotten",
        "verifiers/rejection.py",
        "min(1.0, keep_probs[i] * ratio)",
        "min(1.0, ratio)",
        "test_verifiers.py",
    ),
    Mutation(
        "acceptance rule, block: the end of a draft judged like its middle",
        "verifiers/rejection.py",
        "uniforms[-1] < keep_probs[-1]",
        "uniforms[-1] < keep_probs[-1] ** 2",
        "test_verifiers.py",
    ),
    Mutation(
        "acceptance rule, coupled and greedy: one token too many",
        "verifiers/matching.py",
        "return Outcome(path, own)",
        "return Outcome([*path, *draft.children(path[-1] if path else -1)[:1]], own)",
        "test_loop.py",
    ),
    Mutation(
        "residual: nothing is taken off",
        "verifiers/rejection.py",
        "left[at[shared]] -= drafted.probs[shared]",
        "left[at[shared]] -= 0",
        "test_rejection.py::test_accepted_plus_recovered_is_the_target",
    ),
    Mutation(
        "residual of a block: not scaled",
        "verifiers/rejection.py",
        "surplus(targets[n], draft.probs[n], keep_probs[n])",
        "surplus(targets[n], draft.probs[n])",
        "test_verifiers.py",
    ),
    Mutation(
        "residual of threshold: the usual one",
        "verifiers/lossy.py",
        "surplus(target, accepted)",
        "surplus(target, draft_probs(draft, i))",
        "test_verifiers.py",
    ),
    Mutation(
        "bonus token from the row before",
        "verifiers/matching.py",
        "self.draw(rows, at + 1, noise, position)",
        "self.draw(rows, max(min(at + 1, len(draft) - 1), 0), noise, position)",
        "test_loop.py",
    ),
    Mutation(
        "bonus token from the row before, rejection",
        "verifiers/rejection.py",
        "rows.distribution(len(draft)), noise, position))\n        # The longest",
        "rows.distribution(len(draft) - 1), noise, position))\n        # The longest",
        "test_verifiers.py",
    ),
    Mutation(
        "trim of the main model's cache: one too few",
        "loop.py",
        "request.slot.trim(len(request.sequence) - 1)",
        "request.slot.trim(len(request.sequence))",
        "test_loop.py",
    ),
    Mutation(
        "trim of the draft model's cache: one too few",
        "drafters/draft_state.py",
        "self.slot.trim(num_context + self._num_first(committed.path))",
        "self.slot.trim(num_context + self._num_first(committed.path) + 1)",
        "test_traps.py",
    ),
    Mutation(
        "noise key: without the position",
        "types/decoding.py",
        "counter = self.seed + (self.sample << 64), (position << 128) + (_GUMBEL << 64)",
        "counter = self.seed + (self.sample << 64), _GUMBEL << 64",
        "test_coupled.py",
    ),
    Mutation(
        "noise key: the round's position for every token",
        "verifiers/matching.py",
        "noise.gumbel(position + rows.depth(i), drawn.token_ids)",
        "noise.gumbel(position, drawn.token_ids)",
        "test_loop.py test_coupled.py",
    ),
    Mutation(
        "noise not fresh: drafts keyed by the token's position",
        "verifiers/rejection.py",
        "noise.uniforms(position, purpose, i + 1)[i]",
        "noise.uniforms(position + i, purpose, 1)[0]",
        "test_traps.py",
    ),
    Mutation(
        "noise not fresh: one number for the recovered and the accepted",
        "verifiers/rejection.py",
        'left.draw(noise.uniforms(position, "recover", 1)[0])',
        'left.draw(noise.uniforms(position, "accept", 1)[0])',
        "test_rejection.py::test_samples_have_the_joint_distribution_of_the_main_model",
    ),
    Mutation(
        "a drawn token is dropped where it is improbable",
        "drafters/draft_state.py",
        "        if probs:\n",
        "        if probs and self._token_ids and probs.prob(token_id) < 0.3:\n            return\n        if probs:\n",
        "test_traps.py",
    ),
    Mutation(
        "processors: the state takes rejected tokens",
        "request.py",
        "self.sampler.commit(token_ids)",
        "self.sampler.commit([*draft_token_ids, *token_ids])",
        "test_loop.py",
    ),
    Mutation(
        "processors: a row sees one draft token too few",
        "types/decoding.py",
        "return self.token_ids[:row]",
        "return self.token_ids[: max(row - 1, 0)]",
        "test_traps.py",
    ),
    Mutation(
        "tree: a row sees all draft tokens before it, not those of its path",
        "types/decoding.py",
        "return [self.token_ids[i] for i in self.path_to(row - 1)]",
        "return self.token_ids[:row]",
        "test_trees.py",
    ),
    Mutation(
        "tree: the row of a token is its depth, coupled and greedy",
        "verifiers/matching.py",
        "self.draw(rows, at + 1, noise, position)",
        "self.draw(rows, len(path), noise, position)",
        "test_trees.py",
    ),
    Mutation(
        "tree: the row of a token is that of its depth, rejection",
        "verifiers/rejection.py",
        "target = rows.distribution(at + 1)",
        "target = rows.distribution(len(path))",
        "test_trees.py",
    ),
    Mutation(
        "tree: the noise of a row's number, not of its position",
        "verifiers/matching.py",
        "noise.gumbel(position + rows.depth(i), drawn.token_ids)",
        "noise.gumbel(position + i, drawn.token_ids)",
        "test_trees.py",
    ),
    Mutation(
        "tree: siblings are judged against the row, not the residual",
        "verifiers/rejection.py",
        "target = residual(target, drafted)",
        "target = residual(rows.distribution(at + 1), drafted)",
        "test_trees.py",
    ),
    Mutation(
        "tree: one random number judges all siblings",
        "verifiers/rejection.py",
        "if uniforms[i] * drafted.prob(token_id)",
        "if uniforms[at + 1] * drafted.prob(token_id)",
        "test_trees.py",
    ),
    Mutation(
        "tree: one random number draws all siblings",
        "verifiers/rejection.py",
        'f"draft, sibling {sibling}" if sibling else "draft"',
        '"draft"',
        "test_trees.py",
    ),
    Mutation(
        "tree: siblings are drawn with replacement",
        "verifiers/rejection.py",
        "drafted = drafted.without(drawn[-1][0])",
        "pass",
        "test_trees.py",
    ),
    Mutation(
        "tree: block verification takes it for a chain",
        "verifiers/rejection.py",
        "if not draft.probs or draft.parents is not None:",
        "if not draft.probs:",
        "test_trees.py",
    ),
    Mutation(
        "tree: a row without a token left is found by its depth",
        "sampling/rows.py",
        "error.row = i  #",
        "pass  #",
        "test_trees.py",
    ),
    Mutation(
        "tree: logprobs of the first rows, not of the path's",
        "request.py",
        "zip(outcome.rows, token_ids, strict=False)",
        "enumerate(token_ids)",
        "test_trees.py",
    ),
    Mutation(
        "tree: tokens past the answer's end are counted",
        "request.py",
        "[depth for depth in verified if depth < len(token_ids)]",
        "[*verified]",
        "test_trees.py",
    ),
    Mutation(
        "other vocabulary: draft ids taken for main ids",
        "drafters/vocabulary.py",
        "row[self._main_ids] = logits[self._draft_ids]",
        "row[self._draft_ids] = logits[self._draft_ids]",
        "test_vocabularies.py",
    ),
    Mutation(
        "a cut output matrix: logits taken for those of the first ids",
        "drafters/vocabulary.py",
        "self._row[self._token_ids] = logits",
        "self._row[: len(logits)] = logits",
        "test_subset.py",
    ),
    Mutation(
        "top logits: the smallest listed one may be a tie with others",
        "sampling/top.py",
        "logits[kept].min() > top.bound else None",
        "logits[kept].min() >= top.bound else None",
        "test_top_logits.py",
    ),
    Mutation(
        "top logits: the mass of the others is forgotten",
        "sampling/top.py",
        "(max(total * (1 - tolerance) - listed, 0.0) if exact else 0.0), float(bound)",
        "0.0, 0.0",
        "test_top_logits.py",
    ),
    Mutation(
        "top logits: options that raise others are not asked about",
        "sampling/sampler.py",
        "            if not self._only_lowers:\n                return None\n",
        "",
        "test_top_logits.py",
    ),
    Mutation(
        "controller: what may not pay is drafted without a budget",
        "controller/controller.py",
        "<= budget else safe",
        "<= 1e9 else safe",
        "test_controller.py",
    ),
    Mutation(
        "controller: a batch's rows cost what they cost alone",
        "controller/batch.py",
        "rows, cost = [k + 1 for k in lengths], self.cost",
        "rows, cost = [sum(lengths) + 1], self.cost",
        "test_controller.py",
    ),
    Mutation(
        "places: a drafter keeps its own where another has none",
        "request.py",
        "                taken.callback(drafter.release, self.sequence)\n",
        "",
        "test_policies.py",
    ),
    Mutation(
        "policies: a drafter that is equal is taken for the same",
        "controller/fixed.py",
        "other.drafters[0] is self.drafters[0]",
        "other.drafters[0] == self.drafters[0]",
        "test_policies.py",
    ),
    Mutation(
        "settings: what is not exact is taken if it is fast",
        "setting.py",
        "_EXACT if setting.exactness.holds else _INEXACT",
        "_EXACT",
        "test_setting.py",
    ),
    Mutation(
        "exactness: whatever is measured passes",
        "types/backend.py",
        "return bool(self.differences) and not any(self.differences.values())",
        "return True",
        "test_exactness.py",
    ),
    Mutation(
        "exactness: a padding is taken without being tried",
        "measure/exactness.py",
        "if not any(differences.values()):",
        "if True:",
        "test_exactness.py",
    ),
    Mutation(
        "exactness: only the first rows of readings are compared",
        "measure/exactness.py",
        "made[name] = float(np.abs(rows - references[num_generated][-len(rows) :]).max())",
        "made[name] = float(np.abs(rows - references[num_generated][-len(rows) :])[:0].max(initial=0))",
        "test_exactness.py",
    ),
    Mutation(
        "paged attention: sequences are not padded",
        "backends/paged_call.py",
        "counts = [rule.sequence(len(chain.branch)) for chain in chains]",
        "counts = [len(chain.branch) for chain in chains]",
        "test_bit_exact.py",
    ),
    Mutation(
        "paged attention: calls are not padded",
        "backends/paged_call.py",
        "counts[-1] += rule.call(sum(counts)) - sum(counts)",
        "pass",
        "test_bit_exact.py",
    ),
    Mutation(
        "paged attention: an answer's rows are one sequence",
        "backends/paged_call.py",
        "1 if chain.chunk.generated else rule.sequence(len(chain.branch))",
        "rule.sequence(len(chain.branch))",
        "test_bit_exact.py",
    ),
    Mutation(
        "paged attention: single rows have no company",
        "backends/paged_call.py",
        "0 if call._has_several_in_one else rule.dummy_rows",
        "0",
        "test_bit_exact.py",
    ),
    Mutation(
        "prefix cache: an answer is taken for a prompt",
        "backends/openvino_paged.py",
        "mark(chunk.token_ids) if is_marked else chunk.token_ids",
        "chunk.token_ids",
        "test_bit_exact.py",
    ),
    Mutation(
        "NPU: windows begin where the cache ends",
        "backends/openvino_npu.py",
        "begin = self.sizes.window_begin(min(slot.num_stored, first))",
        "begin = min(slot.num_stored, first)",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: a mask that says nothing of trimmed tokens",
        "backends/openvino_npu.py",
        "mask = np.zeros((1, past + count), dtype=np.int64)",
        "mask = np.zeros((1, begin + count), dtype=np.int64)",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: decoding begins elsewhere than the prompt ended",
        "backends/openvino_npu.py",
        "if self._prefilled not in (None, begin):",
        "if False:",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: a prompt is read to its end, not to a window's beginning",
        "backends/openvino_npu.py",
        "self._prefill(slot, self.sizes.window_begin(first))",
        "self._prefill(slot, first)",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: a window may end where the cache does",
        "backends/npu_sizes.py",
        "_up(self.answer + 2 * self.window, _TOKENS_STEP)",
        "_up(self.answer, _TOKENS_STEP)",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: a prompt takes all that is alike in the last one, whole piece or not",
        "backends/openvino_npu.py",
        "read = token_ids[: self.sizes.window_begin(len(token_ids) - 1)]",
        "read = token_ids",
        "test_openvino_npu.py",
    ),
    Mutation(
        "NPU: what was written over is taken for a prompt",
        "backends/openvino_npu.py",
        "del self._prompt[begin:]",
        "pass",
        "test_openvino_npu.py",
    ),
    Mutation(
        "hidden states: those of the round's last tokens, rejected ones among them",
        "loop.py",
        "target.features(chunk)[kept[: len(read)]]",
        "target.features(chunk)[-len(read) :]",
        "test_features.py",
    ),
    Mutation(
        "hidden states: a drafter is not told where they begin",
        "request.py",
        "self._reserve(max_tokens, slot.length)",
        "self._reserve(max_tokens, 0)",
        "test_features.py",
    ),
    Mutation(
        "a draft goes on behind the end",
        "request.py",
        "return min(self.num_assistant_tokens, left - 1)",
        "return self.num_assistant_tokens",
        "test_loop.py",
    ),
    Mutation(
        "trace: a call ends when the device was done, not when somebody waits for it",
        "trace/recorder.py",
        "ended = min(call.submitted + busy, call.ended)",
        "ended = call.ended",
        "test_trace.py",
    ),
    Mutation(
        "trace: what a thread does behind a draft call ends where it begins something else",
        "trace/recorder.py",
        "        if self._drawing_since:\n",
        "        if False:\n",
        "test_trace.py",
    ),
    Mutation(
        "trace: a request leaves once",
        "trace/recorder.py",
        "if life := self._lives.pop(request, None):",
        "if life := self._lives.get(request):",
        "test_trace.py",
    ),
    Mutation(
        "trace: what began just before the end has an end",
        "trace/events.py",
        "for event in self._begun.values() if last else ():",
        "for event in ():",
        "test_trace.py",
    ),
    Mutation(
        "embeds: prefix caches share within their keys only",
        "types/backend.py",
        "if not self.embeds:",
        "if True:",
        "test_cache.py",
    ),
    Mutation(
        "trace: nobody observes when it is over",
        "engine.py",
        "                self._queue.observer = None\n",
        "",
        "test_trace.py",
    ),
    Mutation(
        "overlap: what was drafted behind a recovery goes when more was kept",
        "drafters/draft_state.py",
        "self.slot.trim(self._num_committed + num_common_tokens(self._behind, said))",
        "pass",
        "test_overlap.py",
    ),
    Mutation(
        "overlap: a recovery is drafted behind the tokens before it",
        "drafters/draft_state.py",
        "self.slot.trim(len(self.context(self.request.sequence)) + guess.num_accepted)",
        "pass",
        "test_overlap.py",
    ),
    Mutation(
        "cache: an ended text leaves what was committed of it",
        "request.py",
        "if self.reuse and self.error is None:\n                self.slot.publish(self.sequence.token_ids)",
        "if self.reuse:\n                self.slot.publish(self.sequence.token_ids)",
        "test_cache.py",
    ),
    Mutation(
        "cache: a slot that is closed at once loses nothing",
        "kv/slot_tokens.py",
        "self._num_published = num_cached",
        "self._num_published = 0",
        "test_cache.py",
    ),
    Mutation(
        "cache: a buffer that another text takes over says so",
        "kv/buffer_pool.py",
        "source.token_ids = source.token_ids[: opening.num_cached]",
        "pass",
        "test_buffer_pool.py",
    ),
    Mutation(
        "cache: a buffer is shared with another scope",
        "kv/buffer_pool.py",
        "if buffer.scope == scope]",
        "]",
        "test_buffer_pool.py",
    ),
    Mutation(
        "cache: blocks are shared with another scope",
        "kv/block_pool.py",
        "self._roots.setdefault(scope, _Root(scope))",
        'self._roots.setdefault(b"", _Root(b""))',
        "test_block_pool.py",
    ),
    Mutation(
        "cache: the end of a text goes before its beginning",
        "kv/block_pool.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        "test_block_pool.py",
    ),
    Mutation(
        "cache: a block that is shared is copied before it is written to",
        "backends/paged_cache.py",
        "self.copy_block(table.copied_block + _NUM_SCRATCH, table.first_own_block + _NUM_SCRATCH)",
        "pass",
        "test_cache.py",
    ),
    Mutation(
        "cache: a request is left with the smaller tensors",
        "backends/paged_cache.py",
        "for request, names in self._requests:",
        "for request, names in self._requests[:1]:",
        "test_block_pool.py",
    ),
    Mutation(
        "cache: tensors that have grown stay when the others could not",
        "backends/paged_cache.py",
        "if old is not None and old.tensor.get_shape()[0] >= num_blocks:",
        "if False:",
        "test_block_pool.py",
    ),
    Mutation(
        "module: a token is read beside its own hidden states",
        "drafters/hidden_state.py",
        "    ahead = 1\n",
        "    ahead = 0\n",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "module: the first of its own hidden states go on, not the last",
        "drafters/hidden_state.py",
        "self._own = np.array(hidden[-1:])",
        "self._own = np.array(hidden[:1])",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "module: its own hidden states take the main model's place",
        "drafters/hidden_state.py",
        "self._input_width - width if is_own else 0 :",
        "0:",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: the draft stays in the slot",
        "drafters/hidden_state.py",
        "        self.slot.trim(self.num_read)\n        self._clear()\n        if committed",
        "        self._clear()\n        if committed",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: the last ones are read, not the next",
        "drafters/hidden_state.py",
        "rows[:count], count == len(rows)",
        "rows[-count:], count == len(rows)",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: the wrong ones are dropped",
        "drafters/hidden_state.py",
        "left = self._kept[0][count:]",
        "left = self._kept[0][: len(self._kept[0]) - count]",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: one behind, and no row is added",
        "drafters/hidden_state.py",
        "np.concatenate([rows[:1], rows]), self._position - 1, False",
        "rows, self._position - 1, False",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: what a part is missing of is published",
        "drafters/hidden_state.py",
        "self.is_whole = self._is_behind or slot.length == position",
        "self.is_whole = True",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: kept though nothing is drafted any more",
        "drafters/hidden_state.py",
        "        if not self.has_space:\n",
        "        if False:\n",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: a prompt is read to its end, and has no draft",
        "drafters/hidden_model.py",
        "left=1)  #",
        "left=0)  #",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: scopes and first tokens are not told apart",
        "drafters/hidden_model.py",
        'b"%d " % sequence.token_ids[0] + sequence.scope',
        "sequence.scope",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "hidden states: in another order than the drafter wants",
        "request.py",
        "[parts[name] for name in wanted]",
        "[parts[name] for name in self.features if name in wanted]",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "block: its masks are of the context",
        "drafters/hidden_state.py",
        "block = [*token_ids, self.request.sequence.token_ids[-1], *self._mask_token_ids]",
        "block = [*token_ids, *self._mask_token_ids, self.request.sequence.token_ids[-1]]",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "places: hidden states of the round's first token",
        "drafters/hidden_state.py",
        "np.array(committed.features[-1:])",
        "np.array(committed.features[:1])",
        "test_hidden_drafters.py",
    ),
    Mutation(
        "heads: the rotation's sign",
        "backends/heads/layers.py",
        "[ops.negative(halves.output(1)), halves.output(0)]",
        "[halves.output(1), ops.negative(halves.output(0))]",
        "../export/test_heads.py",
    ),
    Mutation(
        "heads: EAGLE-3 reads its hidden states behind the norm",
        "backends/heads/recurrent.py",
        'return graph.model(weights.logits(norm(out, weights, "norm")), out)',
        'out = norm(out, weights, "norm")\n    return graph.model(weights.logits(out), out)',
        "../export/test_heads.py",
    ),
    Mutation(
        "heads: no bias",
        "backends/heads/layers.py",
        'if f"{name}.bias" in weights else product',
        "if False else product",
        "../export/test_heads.py",
    ),
    Mutation(
        "heads: those of one place for all sequences come first",
        "backends/heads/places.py",
        "ints(1)) for each in values], 1)",
        "ints(1)) for each in values], 0)",
        "../export/test_heads.py",
    ),
    Mutation(
        "block: its rows come before the context's",
        "backends/openvino_block.py",
        "order += [*range(at_context, at_context + context), *range(at_block, at_block + size)]",
        "order += [*range(at_block, at_block + size), *range(at_context, at_context + context)]",
        "../export/test_heads.py",
    ),
    Mutation(
        "block: its rows do not see those behind",
        "backends/openvino_block.py",
        "types += [0] * context + [1] * size",
        "types += [0] * (context + size)",
        "../export/test_heads.py",
    ),
    Mutation(
        "block: it stays in the cache",
        "backends/openvino_block.py",
        "chunk.slot.append(chunk.token_ids[: _num_context(chunk)])",
        "chunk.slot.append(chunk.token_ids)",
        "../export/test_heads.py",
    ),
    Mutation(
        "hidden states: the first chunk's for all",
        "backends/paged_call.py",
        "made[self.places[id(chunk.slot)]] = chunk.hidden_states",
        "made[: len(chunk.token_ids)] = chunk.hidden_states",
        "../export/test_heads.py",
    ),
    Mutation(
        "Hydra: the seconds of later heads are not counted",
        "backends/openvino_places.py",
        "if self._first is not None:",
        "if False:",
        "../export/test_heads.py",
    ),
    Mutation(
        "hidden states: of the first chunk",
        "backends/paged_step.py",
        "places = self.places[id(chunk.slot)]",
        "places = np.arange(len(chunk.token_ids))",
        "../export/test_taps.py",
    ),
    Mutation(
        "hidden states: within a layer",
        "backends/taps.py",
        "sums[_ADDS * i] for i",
        "sums[max(_ADDS * i - 1, 0)] for i",
        "../export/test_taps.py",
    ),
    Mutation(
        "hidden states: with columns that are made of them",
        "backends/taps.py",
        '== "Concat" else rows',
        '== "None" else rows',
        "../export/test_taps.py",
    ),
    Mutation(
        "hidden states: outputs change the logits' bits, in bf16",
        "backends/taps.py",
        "ops.reshape(same, ints",
        "ops.reshape(part, ints",
        "../export/test_taps.py",
    ),
    Mutation(
        "added drafter: the old bundle's manifest is written to",
        "../../export/outrider_export/heads/add.py",
        "if path != old.folder / MANIFEST_NAME:",
        "if True:",
        "../export/test_add_drafter.py",
    ),
    Mutation(
        "added drafter: rows of the output matrix in the published order",
        "../../export/outrider_export/heads/formats.py",
        "made[name] = values[order]",
        "made[name] = values",
        "../export/test_add_drafter.py",
    ),
    Mutation(
        "added drafter: the cut matrix is not used",
        "backends/heads/weights.py",
        'for own in (f"{name}.weight", f"{MATRIX}.weight"):',
        'for own in (f"{name}.weight",):',
        "../export/test_add_drafter.py",
    ),
    Mutation(
        "added drafter: its graphs are not made",
        "../../export/outrider_export/heads/write.py",
        "check_head(target, Graphs.of(entry, path))",
        "pass",
        "../export/test_add_drafter.py",
    ),
]


def check(tree: Path, mutation: Mutation) -> str | None:
    """The test that fails when `tree` is broken in this way; None if all pass."""
    path = tree / RUNTIME / mutation.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.path} has {text.count(mutation.old)} times {mutation.old!r}; update it.")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        tests = [os.path.normpath(Path("tests/runtime") / test) for test in mutation.tests.split()]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / half) for half in ("runtime", "export"))}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) tests/(?:runtime/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        sys.exit(f"{mutation.name}: pytest could not run.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def main() -> None:
    """Check all mutations, or those whose names contain one of the arguments."""
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for part in ("runtime", "export", "tests", "configs", "samples"):
            shutil.copytree(
                ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis", ".cache")
            )
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutation in chosen:
            noticed = check(tree, mutation)
            unnoticed += noticed is None
            print(f"{'noticed' if noticed else 'UNNOTICED':10} {mutation.name:65} {noticed or ''}", flush=True)
    sys.exit(f"{unnoticed} of {len(chosen)} went unnoticed." if unnoticed else 0)


if __name__ == "__main__":
    main()
