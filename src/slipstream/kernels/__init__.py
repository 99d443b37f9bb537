"""The operations of one decode round in Triton, one a file: reference in fp64, kernel, bytes and FLOPs, bench case.

Every kernel takes up to ROWS rows (an anchor and its drafts) and costs the same for one as for all: a row's numbers
come from the same tiles in the same order whatever rides along, so they have the same bits in any company. They know
nothing about models, requests or graphs; sizes come in as arguments, and where a round stands is read from `state`.

Programmatic dependent launch (PDL): with `pdl` a kernel lets its successor start on its first line, loads weights,
which never change, and only then waits for its predecessor. Every kernel of a chain must wait, or one that skipped
would let its successor overtake.
"""
