"""Timing of the decode programs against peers and a measured ceiling."""
