"""Decides what each step computes, and when a sequence ends. No torch: it runs in simulations too."""
