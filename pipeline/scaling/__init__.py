"""How many workers a pool should have: a policy that is a pure function, and what it is fed from."""
