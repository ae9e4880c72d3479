"""The encoder ledger: outputs of vision and audio towers. Empty as long as there are no media."""

from purestep.state.pytree import tree


@tree
class EncoderLedger:
    """Which encoder outputs are resident, and who still needs them."""
