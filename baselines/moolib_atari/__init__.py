"""IMPALA as moolib's Atari example builds it, instrumented: peers that sum gradients while they act."""
