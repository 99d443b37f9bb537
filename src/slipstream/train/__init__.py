"""Training of block drafters: texts by the target itself, what its layers say of them, a model that guesses.

    prompts -> data: answers of the target, every token -> target: taps and final hidden states of a batch
    drafter: blocks after random anchors -> loss against the target's distribution -> export: a folder that loads

`slipstream.train.loop.train_drafter` runs all of it.
"""
