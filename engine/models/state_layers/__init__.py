"""Layers that have states instead of attention: gated delta nets, Mamba-2 and short convolutions."""
