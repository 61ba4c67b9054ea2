"""How a text is drawn, or searched for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    """Keeps what has at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt and output hold, and multiplies their negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Likewise, as often as the output holds them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), by id."""

    @property
    def counts_output(self) -> bool:
        """Whether it matters which tokens the output holds already, and how often."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens came before."""
        return self.repetition_penalty != 1 or self.counts_output


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """A search for the likeliest texts in place of draws."""

    width: int
    """Beams kept."""
    length_penalty: float = 1.0
    """Texts are ranked by the logarithm of their probability over their length to this power."""
    early_stopping: bool = False
    """End as soon as `width` texts have ended, though better ones may come."""
    exhaustive: bool = False
    """End only when no beam could do better even at its full length; not with `early_stopping`."""
