"""The three wires: each reads and writes requests and answers; `neutral` stands between them."""
