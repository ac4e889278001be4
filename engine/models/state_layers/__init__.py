"""Layers that have states instead of attention: gated delta nets and short convolutions."""
