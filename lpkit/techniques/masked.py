"""Masked pre-training: a bidirectional model is asked for tokens that it cannot see. No torch.

BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) hides 15% of the tokens behind a mask,
and every layer sees all. A masked autoencoder (He et al. 2021, https://arxiv.org/abs/2111.06377)
hides 75%: its first layers, the encoder, see the visible tokens alone, and its last ones, the
decoder, all, with the mask's embedding in each place that is hidden. The loss of both is the mean
cross-entropy of hidden tokens, which weights of a batch make of next-token's. So an autoencoder is
no other objective: it is a change of the model, a fold of the tokens that its layers see.

    model.attention=bidirectional model.vocab=257       the last row of the embedding is the mask's
    data.policy=random-masked data.policy.share=0.75
    model.changes=masked-autoencoder:encoder_layers=3   without it: as BERT

A hidden token is always the mask here, where BERT leaves or changes a few; and the decoder is as
wide as the encoder, without a norm between them, where He's is narrower.
"""

from dataclasses import dataclass, replace
from typing import Any

from lpkit.techniques.operation import POSITIONS, TOKEN_ID, Hold, Kind, MicroBatch, Op
from lpkit.techniques.row import Settings
from lpkit.values import Count, CountOrZero, InnerShare


def hidden_tokens(share: float, T: int) -> int:
    """Of T tokens; in each sequence as many, so that what is left is a tensor."""
    return round(share * T)


def _one_way(m: Any) -> str:
    rule = m.attention.rule(m.T)
    return "" if rule and not rule.causal else (
        f"asks for tokens among others, and model.attention={m.attention.name} sees none to come; "
        f"set model.attention=bidirectional and data.policy=random-masked")


@dataclass(frozen=True, kw_only=True)
class Hiding(Settings):
    where = "data.policy."

    share: InnerShare = 0.15    # of the tokens
    mask: CountOrZero = 256     # the token in their place, the last of the vocabulary

    def problem(self, m: Any) -> str:
        """Why the model `m` cannot be trained by it, and the way out; empty: it can."""
        if why := _one_way(m):
            return f"data.policy={self.name} {why}"
        hidden = hidden_tokens(self.share, m.T)
        if not 0 < hidden < m.T:
            return (f"data.policy.share={self.share:g} hides {hidden} of model.context={m.T} "
                    f"tokens; let it hide some, and leave some")
        if self.mask != m.V - 1:
            return (f"data.policy.mask={self.mask} must be the last token of model.vocab={m.V}; "
                    f"set model.vocab={self.mask + 1}")
        others = [one.hidden for one in m.changes if isinstance(one, Autoencoder)
                  and hidden_tokens(one.hidden, m.T) != hidden]
        return others and (f"data.policy.share={self.share:g} is not the share {others[0]:g} that "
                           f"the encoder does not see; set data.policy.share={others[0]:g}") or ""


@dataclass(frozen=True, kw_only=True)
class Autoencoder(Settings):
    """`hidden`: the share of the tokens that the first `encoder_layers` do not see."""

    where = "model.changes."

    encoder_layers: Count = 3
    hidden: InnerShare = 0.75

    def problem(self, m: Any) -> str:
        """Why the model `m` cannot have it, and the way out; empty: it can."""
        why = _one_way(m)
        if not why and self.encoder_layers >= m.L:
            why = (f"has encoder_layers={self.encoder_layers}, and none of model.layers={m.L} is "
                   f"left to see the masks; set encoder_layers to {m.L - 1} or less")
        if not why and m.changes[-1] != self:
            why = "leaves tokens out of what other changes add; name it last"
        return why and f"model.changes={self.name} {why}"


def fewer_tokens(ops: Any, s: MicroBatch, settings: Autoencoder) -> Any:
    """Layers of the encoder see a share of the tokens, which are taken out before and put back."""
    m, N, part = s.model, settings.encoder_layers, s.stream_bytes / s.model.L   # as all of a block
    share = 1 - hidden_tokens(settings.hidden, m.T) / m.T
    saved = TOKEN_ID + POSITIONS[m.position].turns * 2 * m.E * s.residual_bytes     # a token
    moved = Op(name="encoder", part="", saved_bytes=saved * share * s.tokens / m.L,
               moved_bytes=(2 + 4 * share) * part, backward=(Hold(nbytes=(1 + share) * part),))
    return replace(ops, block=(moved, *(op.seeing(*[share] * N, *[1.0] * (m.L - N))
                                        for op in ops.block)))


def _problem(config: Any, recipe: Any) -> str:
    """Why it cannot be trained beside the rest of a Config, and the way out; empty: it can."""
    if not isinstance(config.data.policy, Hiding):
        return (f"needs as many hidden tokens in each sequence, and data.policy="
                f"{config.data.policy.name} is none that says so; set data.policy=random-masked")
    for key, asked, whole in (("sizes", config.sizes.name, "constant"),
                              ("parallel.context", config.parallel.context, 1)):
        if asked != whole:
            return f"sees a share of whole sequences, and {key}={asked} cuts them; set {key}={whole}"
    return ""


MASKED = {"masked-autoencoder": Kind(
    operations=fewer_tokens, why="its first layers see the visible tokens alone, its last ones all",
    source="He et al. 2021, https://arxiv.org/abs/2111.06377", settings=Autoencoder(),
    problem=_problem, implementation="lpkit.nn.masked:encode_visible")}
