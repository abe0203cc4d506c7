"""ReaL-RL: RLHF training that plans itself."""

__version__ = "0.1.0"
