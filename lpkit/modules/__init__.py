"""Tools for any `torch.nn.Module`: convert its Linears to low precision, predict the memory and
time of a training step, and measure training steps.

    report = lpkit.convert(model, "mxfp8")
    predicted = lpkit.predict(model, batch, machine="h200", precision="mxfp8")
    with lpkit.watch(model, optimizer) as seen: ...

The model need not contain modules of `lpkit.nn`, and the training loop need not be that of lpkit. A
step is a forward pass, a backward pass and an update.
"""
