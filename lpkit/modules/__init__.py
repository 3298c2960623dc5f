"""Any `torch.nn.Module`: convert it to low precision, predict a training step of it, watch one.

    report = lpkit.convert(model, "mxfp8")
    predicted = lpkit.predict(model, batch, machine="h200", precision="mxfp8")
    with lpkit.watch(model, optimizer) as seen: ...

Nothing here asks for a module of `lpkit.nn`: a model is a tree of modules with parameters, and a
step is a forward, a backward and an update of it.
"""
