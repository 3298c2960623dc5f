"""Tools for any `torch.nn.Module`: convert it to low precision, predict a training step of it, and
watch its training steps.

    report = lpkit.convert(model, "mxfp8")
    predicted = lpkit.predict(model, batch, machine="h200", precision="mxfp8")
    with lpkit.watch(model, optimizer) as seen: ...

The model needs no module of `lpkit.nn`. A model is a tree of modules with parameters; a step is a
forward pass, a backward pass and an update.
"""
