"""The ground floor: models of everything that crosses a process boundary. Imports nothing else of ours."""
