"""Everything ember is trained on, generated from a seed. Nothing here reads a file or the network.

One module per family of tasks; each exports `TASKS`, a dictionary from a task's name to a function
`make(rng) -> Sample`. `mix` draws from all of them.
"""
