"""Proposers of draft tokens: n-grams of the text, sibling answers, a draft model, an EAGLE-3 head."""
