"""What tests of the CUDA runtime begin with."""

from aotc.runtime.sampling import SamplingParams
from aotc.runtime.sequence import Request, Sequence


def sequence(*tokens, slot=0, **settings):
    """A sequence in its slot, as the engine makes it."""
    params = SamplingParams(temperature=0, **settings)
    made = Sequence(Request("s", tokens, params), slot, list(tokens))
    made.bias = params.bias_arrays() if params.logit_bias else None
    return made
