"""Every definition of the course, changed in one place: each change must be judged wrong.

    python -m tests.lessons.judging.mutants [TEXT]     # those whose name contains TEXT: all of
    them, half an hour

A change is made in the tree of the solution's source: a call of clamp, max or abs goes, a
comparison turns or becomes strict, a constant moves by one, a term goes, operands change places, a
sign turns, a slice loses a bound, a loop its last turn. What behaves as the definition does for
everything that the text allows is listed in `SAME`, with the reason.
"""

import ast
import copy
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import torch

from lessons.judging import judge, puzzles
from lessons.ranks import on_ranks
from tests.lessons.judging.course import EXERCISES, PUZZLES

SECONDS = 3.0       # of the processor, for one mutant: one that loops raises
THROUGH = {"abs", "round", "ceil", "floor", "float", "clamp", "square", "sqrt", "exp", "log", "int",
           "sign", "double", "t", "contiguous",
           # of one argument: may be left out
           "detach", "clone", "item", "log_softmax", "sum", "cumsum", "tril", "amax", "bfloat16"}
INSTEAD = {"max": "min", "min": "max", "amax": "amin", "maximum": "minimum", "ceil": "floor",
           "floor": "ceil", "round": "floor", "log2": "log",
           "log10": "log2", "log": "log2", "sum": "mean", "mean": "sum", "argmax": "argmin",
           "tril": "triu", "exp": "exp2", "square": "abs",
           "norm": "sum", "atomic_max": "atomic_add", "sorted": "list", "any": "all", "all": "any",
           "zeros": "ones", "rsqrt": "sqrt",
           "atomic_add": "atomic_max", "float8_e4m3fn": "float8_e5m2",
           "float8_e5m2": "float8_e4m3fn", "fmean": "sum", "zeros_like": "ones_like",
           "enable_grad": "no_grad", "no_grad": "enable_grad", "softmax": "log_softmax",
           "isfinite": "isnan"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "zip", "broadcast_shapes", "slice", "zeros",
             "full", "empty"}
OPERATORS = {ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div, ast.Add],
             ast.Div: [ast.Mult, ast.FloorDiv], ast.FloorDiv: [ast.Div],
             ast.Pow: [ast.Mult], ast.Mod: [ast.FloorDiv], ast.LShift: [ast.RShift],
             ast.RShift: [ast.LShift], ast.BitAnd: [ast.BitOr],
             ast.BitOr: [ast.BitAnd], ast.MatMult: []}
COMPARISONS = {ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt, ast.GtE], ast.Gt: [ast.GtE, ast.Lt],
               ast.GtE: [ast.Gt, ast.LtE], ast.Eq: [ast.NotEq],
               ast.NotEq: [ast.Eq]}


@dataclass(frozen=True)
class Mutant:
    name: str       # of the exercise
    change: str     # the first line that is another, and its number
    source: str


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in its place."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            for other in OPERATORS[type(op)]:
                yield replaced(node, op=other())
            if isinstance(op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Pow, ast.Mod, ast.MatMult)):
                yield replaced(node, left=right, right=left)
            yield left
            yield right
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for other in COMPARISONS.get(type(op), ()):
                yield replaced(node, ops=[other()])
        case ast.BoolOp(op=op, values=values):
            yield replaced(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield from values
        case ast.Constant(value=bool()):
            pass        # keepdim, strict: keywords that may go
        case ast.Constant(value=int(value)):
            yield replaced(node, value=value + 1)
            yield replaced(node, value=value - 1)
        case ast.Constant(value=float(value)):
            yield replaced(node, value=value + 1)
            yield replaced(node, value=value / 2)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Call(func=func, args=args, keywords=keywords):
            name = func.attr if isinstance(func, ast.Attribute) else func.id
            if name in INSTEAD:
                yield replaced(node, func=named(func, INSTEAD[name]))
            module = (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)
                      and func.value.id in ("math", "torch", "tl", "dist"))
            if (isinstance(func, ast.Attribute) and not module
                and name in THROUGH | {"to", "view", "expand"}):
                yield func.value
            elif name in THROUGH and args:
                yield args[0]
            elif len(args) == 2 and name in ("max", "min", "maximum", "minimum", "where"):
                yield from args
            elif name == "where":
                yield from args[1:]
            if len(args) >= 2 and name not in SYMMETRIC:
                yield replaced(node, args=[args[1], args[0], *args[2:]])
            if name == "range":
                yield replaced(node, args=shorter(args))
            for keyword in keywords:
                if keyword.arg != "strict":
                    yield replaced(node, keywords=[other for other in keywords
                                                   if other is not keyword])
        case ast.Subscript(slice=ast.Slice()):
            for bound in ("lower", "upper", "step"):
                if getattr(node.slice, bound):
                    yield replaced(node, slice=replaced(node.slice, **{bound: None}))
        case ast.Attribute(value=value, attr=attr) if attr in ("T", "mT"):
            yield value
        case ast.Attribute(attr=attr) if attr in INSTEAD:
            yield named(node, INSTEAD[attr])
        case ast.AugAssign(target=target, value=value):
            yield ast.Assign(targets=[target], value=value, lineno=1)
            if isinstance(node.op, (ast.Add, ast.Sub)):
                yield replaced(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
            yield ast.Pass()
        case ast.If(test=test, body=body, orelse=orelse):
            yield replaced(node, test=ast.UnaryOp(op=ast.Not(), operand=test))
            yield replaced(node, test=ast.Constant(value=True))
            yield replaced(node, test=ast.Constant(value=False))
        case (ast.ListComp(generators=[generator])
              | ast.GeneratorExp(generators=[generator])) if generator.ifs:
            yield replaced(node, generators=[replaced(generator, ifs=[])])
        case ast.Tuple(elts=[first, second], ctx=ast.Load()):
            yield replaced(node, elts=[second, first])


def replaced(node: ast.AST, **fields) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def named(func: ast.AST, name: str) -> ast.AST:
    return replaced(func, attr=name) if isinstance(func, ast.Attribute) else replaced(func, id=name)


def shorter(args: list[ast.expr]) -> list[ast.expr]:
    """Of a range: without its last turn."""
    stop = args[0] if len(args) == 1 else args[1]
    by = args[2] if len(args) == 3 else ast.Constant(value=1)
    less = ast.BinOp(left=stop, op=ast.Sub(), right=by)
    return [less] if len(args) == 1 else [args[0], less, *args[2:]]


def mutants(name: str) -> list[Mutant]:
    """All changes of the solution, each once; annotations and the docstring stay."""
    source = EXERCISES[name].solution
    tree = ast.parse(source)
    kept = {id(inner) for node in ast.walk(tree) for outer in (getattr(node, "annotation", None),
        getattr(node, "returns", None),
            node if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None)
        if outer for inner in ast.walk(outer)}
    by_text, lines = {}, ast.unparse(tree)
    for place in (node for node in ast.walk(tree) if id(node) not in kept):
        for other in changes(place):
            changed = ast.unparse(ast.fix_missing_locations(put(tree, place, other)))
            if changed != lines:
                by_text.setdefault(changed,
                                   next(f"{number}: {new.strip()}" for number, (old,
                                     new) in enumerate(zip_longest(
                    lines.splitlines(), changed.splitlines(), fillvalue="")) if new != old))
    return [Mutant(name, change, text) for text, change in by_text.items()]


def put(node: ast.AST, place: ast.AST, other: ast.AST) -> ast.AST:
    """A copy of the tree in which `other` stands in the place."""
    if node is place:
        return other
    copied = copy.copy(node)
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(copied, field, [put(element, place, other)
                                    if isinstance(element, ast.AST) else element
                                    for element in value])
        elif isinstance(value, ast.AST):
            setattr(copied, field, put(value, place, other))
    return copied


def is_wrong(mutant: Mutant) -> bool:
    """Of an exercise that is no puzzle."""
    exercise = EXERCISES[mutant.name]
    try:
        with at_most(SECONDS):
            names = dict(exercise.spec.__globals__)
            exec(compile(mutant.source, mutant.name, "exec"), names)
            attempt = names[ast.parse(mutant.source).body[0].name]
            if isinstance(exercise, on_ranks.OnRanks):
                return bool(on_threads(exercise, attempt))
            return judge.check(exercise, attempt).status != "right"
    except Exception:
        return True


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what has taken more of the processor."""
    def end(*_):
        raise TimeoutError(f"more than {seconds} s")
    signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def on_threads(exercise: on_ranks.OnRanks, attempt: Callable) -> list[str]:
    """Why the judge finds an attempt wrong, empty where it does not: ranks are threads, collectives
    a list and a barrier."""
    world = on_ranks.WORLD
    sent, meet, whys = [None] * world, threading.Barrier(world, timeout=5), []

    def rank(own: int) -> None:
        def shared(x):
            sent[own] = x.detach().clone()
            meet.wait()
            stacked = torch.stack(sent)
            meet.wait()
            return stacked

        collectives = {"reduce_scatter": lambda x: shared(x).sum(0).chunk(world)[own].clone(),
                       "all_gather": lambda x: shared(x).flatten(),
                       "all_gather_bytes": lambda x: shared(x.view(torch.uint8)
                           if x.dtype == torch.uint8 else None).flatten(),
                       "all_reduce_max": lambda x: shared(x).amax(0)}
        try:
            for case in exercise.all_cases():
                got = on_ranks.answer_on_rank(exercise, attempt, case, own, world, collectives)
                if got.why:
                    raise ValueError(got.why)       # ends the other rank's wait, too
                given = functools.partial(on_ranks.given_to, exercise, case, own, world,
                                          collectives)
                want, others = (both(exercise, given) for both in (judge.expected, judge.disturbed))
                whys.extend(filter(None, [judge.difference(got.value, want, exercise.tolerance,
                    others)]))
        except Exception as error:
            whys.append(str(error))
            meet.abort()

    ranks = [threading.Thread(target=rank, args=(own,)) for own in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return list(filter(None, whys))


def judged_right(chosen: list[Mutant]) -> list[Mutant]:
    kernels = [mutant for mutant in chosen if mutant.name in PUZZLES]
    verdicts = puzzles.run([(mutant.name, mutant.source) for mutant in kernels]) if kernels else []
    wrong = {id(mutant) for mutant, verdict in zip(kernels, verdicts)
             if verdict["status"] == "wrong"}
    return [mutant for mutant in chosen if id(mutant) not in wrong
            and (mutant.name in PUZZLES or not is_wrong(mutant))]


def is_same(mutant: Mutant) -> bool:
    """A part that ends in $ ends the line."""
    return any(part in f"{mutant.change}$" for names in SAME.values()
               for part in names.get(mutant.name, ()))


FP8_CLAMPS = ("clamp(-448, 449)", "clamp(-448, 447)", "clamp(-449, 448)", "clamp(-447, 448)")
# why a change is the definition all the same; of which exercise, and what stands in the first line
# that is another: each found by a survivor, and thought about
SAME = {
    "0 times whatever factor": {"00.clip": ("else 2.0", "else 0.5")},
    "a number, or a tensor of one": {"00.clip": ("most / norm)",),
        "14.clip": ("g.square().sum() for g",)},
    "the last of two axes": {"00.cross_entropy": ("amax(1,", "gather(1,", "sum(1)"),
        "08.chunked_loss": ("log_softmax(1)", "gather(1,")},
    "the only column": {"00.cross_entropy": ("[:, None])[:, -1]",)},
    "a whole n is right": {"02.smallest_square": ("// bytes_per_second",)},
    "the same numbers in float64": {"03.cast": ("return (whole * step).clamp(-largest, largest)",)},
    "division by a power of two is exact in float32": {"03.cast": ("torch.round(x / step)",
        "torch.frexp(x)")},
    "between 432 and 464 all is rounded to 448": {"03.mx_cast": (*FP8_CLAMPS,),
        "06.fp8_forward": (*FP8_CLAMPS,), "06.fp8_backward": (*FP8_CLAMPS,),
        "10.scaled_cast": ("tl.abs(v), 449.0)",)},
    "half way is not asked: it goes to the even one": {"05.is_lost": ("update <= 2.0",)},
    "bf16 less float32 is float32": {"05.with_masters": ("master = weight",)},
    "what has been found is found again": {"17.step": ("4: if True:",)},
    "in another order": {"19.sign_flip": ("product((1, -1)",),
        "27.mup_rate": ("('head', 'hidden')",)},
    "the inverse of a symmetric matrix is symmetric": {"29.compensate": ("inverse[q, :]",)},
    "groups of four lie in the same order in memory": {"29.two_of_four": (
        "reshape(-1, w.shape[0], 4)",)},
    "a number goes through a product": {"26.step": ("gram @ (2.0315 * gram)",)},
    "gradients are as long as one another": {
        "18.feedback": ("len(gradients[1])", "len(gradients[-1])")},
    "no count is above n": {"28.coin": ("range(more, n + 2)",)},
    "a square has no sign": {"27.power": ("(mean - a) ** 2",), "07.sqnr_db": ("(b - a) ** 2",)},
    "the layer before the first would never be left out": {"23.area": ("range(0, layers + 1)",)},
    "of vectors that are orthogonal to W the product takes none": {"24.pissa": ("linalg.svd(w)$",)},
    "two axes change places either way": {"24.c_attn": ("transpose(1, 0)",)},
    "these are rounded to 57344": {"06.fp8_backward": ("57345", "57343")},
    "of a first step `above` is not above, whichever loss it is": {
        "06.speedup": (": above = losses[step - 2] if step >= 1",
        ": above = losses[step - 2] if step > 0", "4: above = losses[step - 2]$")},
    "one is left": {"07.bisect": ("layers[-1]",)},
    "half a spacing to the last bit is not asked": {"07.saturated": ("a >= amax * 464 / 448",)},
    "a tensor of one number": {"07.worst_row": ("return torch.where",)},
    "a ratio of squares over the last of two axes": {"07.worst_row": ("mean(-1)", "sum(1)",
        "(y - x)")},
    "0 divided by whatever scale": {"08.moment": ("else 2.0", "else 0.5"),
        "11.block_scale": ("s > 0, s, 2.0", "s > 0, s, 0.5")},
    "x comes without a graph": {"08.recomputed": ("x = x.requires_grad_()",)},
    "one gradient": {"08.recomputed": ("x, dy)[-1]",)},
    "more than all blocks hold more than all": {"08.segment": ("range(1, layers + 2)",)},
    "batch + 1 does not divide batch": {"09.micro_batch": ("range(1, batch + 2)",)},
    "Python counts from the end": {"09.reduce_scatter": ("[rank - turn]",)},
    "one more than the heads does not divide them": {
        "09.tensor_ranks": ("range(1, kv_heads + 2)",)},
    "whole tokens are right": {"09.tokens": ("// (6 * parameters)",)},
    "a sum of products": {"13.linear_attention": ("(total @ q[t])",)},
    "one of two neighbours is even": {"13.window_pairs": ("(window + 1) / 2",)},
    "what begins behind the last row ends before it begins": {
        "15.pieces": ("return (rank * each, min",)},
    "the only axis": {"10.amax": ("tl.abs(v), -1)",), "10.softmax": ("tl.max(v, -1)",
        "tl.sum(v, -1)"), "10.add_norm": ("tl.sum(v * v, -1)",), "11.nvfp4": ("tl.abs(odd)), -1)",),
        "11.block_scale": ("tl.abs(v), -1)",), "11.online_softmax": ("tl.max(v, -1)",
        "tl.sum(tl.exp(v - new), -1)"), "11.e8m0": ("tl.abs(v), -1)",)},
    "what is not stored": {"10.add_norm": ("g = tl.load(w + i, mask=i < columns",),
        "10.scaled_cast": ("v = tl.load(x + i, mask=i < n) *", "other=1.0)"),
        "11.dequant_matmul": ("mask=n < N)", "mask=n < N, other=1.0)"),
        "11.online_softmax": ("9: v = tl.load(x + row * x_stride + i + j, mask=i + j < columns)",
        "9: v = tl.load(x + row * x_stride + i + j, mask=i + j < columns, other=1.0)")},
    "the code of NaN is set below": {"10.scaled_cast": ("size = tl.minimum",
        "size = tl.where(0.0, v", "size = tl.where(v != v, 1.0")},
    "the least normal number is 8 steps of the subnormal ones": {
        "10.scaled_cast": ("size <= 0.015625",)},
    "k + k / 512, cut": {"10.scaled_cast": ("size * 513.0",)},
    "a last bit is 0 wherever there is a tie": {"10.scaled_cast": ("2139095041",)},
    "the sign is shifted in": {"10.scaled_cast": (">> 25 & 128",)},
    "a store casts": {"10.scaled_cast": ("tl.store(codes + i, code,",),
        "11.nvfp4": ("block * 8 + pair, code)",), "11.e8m0": ("num_programs(1) + block, s)",)},
    "the other factor is 0 there": {
        "11.matmul": ("left = tl.load(a + m[:, None] * a_stride + (k + j)[None, :], "
                      "mask=(m < M)[:, None] & (k + j < K)[None, :], other=1.0)",
                      "right = tl.load(b + (k + j)[:, None] * N + n[None, :], "
                      "mask=(k + j < K)[:, None] & (n < N)[None, :], other=1.0)"),
        "11.dequant_matmul": ("(k + j < K)[None, :], other=1.0)",
        "(k + j < K)[:, None], other=1)")},
    "the largest of both axes": {"10.cast_both": ("1), -1))", "0), 0))")},
    "where the scale is 0, so is the code: what is divided by does not matter": {
        "11.nvfp4": ("some = by$", "(by >= 0, by, 1.0)", "(by > -1, by, 1.0)", "(by > 0, by, 2.0)",
        "(by > 0, by, 0.5)")},
    "1 times exp(-inf) is 0": {"11.online_softmax": ("most, total = (-float('inf'), 1.0)",)},
}


if __name__ == "__main__":
    text, total, wrong = (sys.argv[1:] or [""])[0], 0, 0
    for name in EXERCISES:
        if text in name:
            every = mutants(name)
            right, total = judged_right(every), total + len(every)
            print(f"{name}: {len(right)} of {len(every)} are judged right", flush=True)
            for mutant in every:
                if (mutant in right) != is_same(mutant):
                    wrong += 1
                    print("    ", "it is right, and not in SAME:" if mutant in right
                          else "it is wrong, and in SAME:", mutant.change, flush=True)
    print(f"{total} changes; {wrong} are not judged as they should be")
    sys.exit(bool(wrong))
