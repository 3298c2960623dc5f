"""Masked pre-training: a bidirectional model predicts tokens that are hidden from it.

    lpkit train cpu-3m model.vocab=257 model.attention=bidirectional data.policy=masked \\
        --import lessons.rows.masked

BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) hides 15% of the tokens behind a mask,
and every layer sees all places. A masked autoencoder (He et al. 2021,
https://arxiv.org/abs/2111.06377) hides 75%. Its first layers (the encoder) see only the visible
tokens; its last layers see all places, with the mask's embedding for hidden tokens. The loss of
both is the mean cross-entropy of the hidden tokens: the next-token loss with a batch's targets and
weights. The autoencoder is a change of the model. Here a hidden token is always replaced by the
mask, and the decoder is as wide as the encoder.
"""

from dataclasses import dataclass, replace
from typing import Any

from lpkit.techniques.attention import KINDS, AttentionKind, Rule, Softmax
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.techniques.data import POLICIES, Policy
from lpkit.techniques.operation import POSITIONS, TOKEN_ID, Hold, Kind, MicroBatch, Op
from lpkit.techniques.row import Settings
from lpkit.values import Count, CountOrZero, InnerShare


def hidden_tokens(share: float, T: int) -> int:
    """Return how many of T tokens are hidden. The number is equal for all sequences, so that the
    visible tokens form a tensor."""
    return round(share * T)


def _one_way(m: Any) -> str:
    rule = m.attention.rule(m.T)
    return "" if rule and not rule.causal else (
        f"needs attention to tokens to come, and model.attention={m.attention.name} has none; set "
        f"model.attention=bidirectional and data.policy=masked")


@dataclass(frozen=True, kw_only=True)
class Bidirectional(Softmax):
    def rule(self, T: int) -> Rule:
        return replace(super().rule(T), causal=False)


@dataclass(frozen=True, kw_only=True)
class Hiding(Settings):
    share: InnerShare = 0.15    # share of the tokens that are hidden
    mask: CountOrZero = 256     # the token that replaces them, the last of the vocabulary

    def problem(self, m: Any) -> str:
        asked, hidden = f"data.policy.share={self.share:g}", hidden_tokens(self.share, m.T)
        if why := _one_way(m):
            return f"data.policy={self.name} {why}"
        if not 0 < hidden < m.T:
            return f"{asked} hides {hidden} of model.context={m.T} tokens; hide some, and leave some"
        if self.mask != m.V - 1:
            return (f"data.policy.mask={self.mask} must be the last token of model.vocab={m.V}; "
                    f"set model.vocab={self.mask + 1}")
        for change in m.changes:
            if isinstance(change, Autoencoder) and hidden_tokens(change.hidden, m.T) != hidden:
                return f"{asked} is not what the encoder leaves out; set it to {change.hidden:g}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Autoencoder(Settings):
    encoder_layers: Count = 3
    hidden: InnerShare = 0.75       # share of the tokens that the encoder does not see

    def problem(self, m: Any) -> str:
        why = _one_way(m)
        if not why and self.encoder_layers >= m.L:
            why = f"has encoder_layers={self.encoder_layers}; set fewer than model.layers={m.L}"
        if not why and m.changes[-1] != self:
            why = "leaves tokens out of what other changes add; name it last"
        return why and f"model.changes={self.name} {why}"


def fewer_tokens(ops: Any, s: MicroBatch, settings: Autoencoder) -> Any:
    """Return the operations of a masked autoencoder. The encoder's layers see a share of the
    tokens, which are gathered before the encoder and put back after it."""
    m, N, part = s.model, settings.encoder_layers, s.stream_bytes / s.model.L   # counted L times
    share = 1 - hidden_tokens(settings.hidden, m.T) / m.T
    saved = TOKEN_ID + POSITIONS[m.position].turns * 2 * m.E * s.residual_bytes     # per token
    moved = Op(name="encoder", part="", saved_bytes=saved * share * s.tokens / m.L,
               moved_bytes=(2 + 4 * share) * part, backward=(Hold(nbytes=(1 + share) * part),))
    seen = (op.seeing(*[share] * N, *[1.0] * (m.L - N)) for op in ops.block)
    return replace(ops, block=(moved, *seen))


def _problem(config: Any, recipe: Any) -> str:
    for key, asked, can in (("data.policy", config.data.policy.name, "masked"),
                            ("sizes", config.sizes.name, "constant"),
                            ("parallel.context", config.parallel.context, 1)):
        if asked != can:
            return f"sees as many tokens of each sequence, and {key}={asked} others; set {key}={can}"
    return ""


KINDS["bidirectional"] = AttentionKind(
    why="every token, also those to come: for masked pre-training", settings=Bidirectional(),
    source="Devlin et al. 2018, https://arxiv.org/abs/1810.04805")
POLICIES["masked"] = Policy(
    why="random windows, of which some tokens are hidden and asked for, also in evaluation: of the "
        "validation text, by the seed", hides=True, settings=Hiding(), evaluation="masked",
    implementation="lessons.rows.masked_torch:Masked",
    source="Devlin et al. 2018, https://arxiv.org/abs/1810.04805")
MODEL_CHANGES["masked-autoencoder"] = Kind(
    operations=fewer_tokens, why="its first layers see the visible tokens alone, its last ones all",
    source="He et al. 2021, https://arxiv.org/abs/2111.06377", settings=Autoencoder(),
    problem=_problem, implementation="lessons.rows.masked_torch:encode_visible")
