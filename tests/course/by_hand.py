"""Somebody who has read the notebooks and has a calculator: the capstone by printed formulas alone.

Nothing of lpkit is imported. Each function names the cell that prints what it uses, and how it
reads there (`FORMULAS`); of a cell that shows a table, the table itself is read (`Printed`): its
terms are put into Python as they stand.
tests/course/test_capstone.py executes those cells, and finds every formula in its cell.
"""

import math
import re
from html.parser import HTMLParser

FORMULAS: list[tuple[str, str]] = []        # cell, what stands in it


def printed(cell: str, *says: str):
    def keep(function):
        FORMULAS.extend((cell, phrase) for phrase in says)
        return function
    return keep


def evaluated(text: str, numbers: dict[str, int]) -> float:
    """What somebody gets who reads a printed term with a calculator."""
    spaced = re.sub(r"([A-Z])", r" \1 ", text.replace(",", "")).replace(" x ", " ")
    python = re.sub(r"(?<=[\w)²³])\s+(?=[\w(])", "*", spaced.replace(" ²", "²").replace(" ³", "³"))
    return eval(python.replace("²", "**2").replace("³", "**3"), {}, numbers)


class Printed(HTMLParser):
    """The tables that a cell shows, each as a list of rows of words; captions are left out."""

    def __init__(self, page: str):
        super().__init__()
        self.tables, self.cell = [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = ""

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self.cell)
            self.cell = None

    def column(self, table: int, name: str) -> dict[str, str]:
        """By row; `name` as it begins."""
        heads, *rows = self.tables[table]
        at = next(i for i, head in enumerate(heads) if i and head.startswith(name))
        return {row[0]: row[at] for row in rows if row[at]}


class Reader:
    """`shown`: the HTML of a cell, by id. Answers for a sheet of lesson 99."""

    def __init__(self, shown: dict[str, str]):
        self.tables = {cell: Printed(page) for cell, page in shown.items()}

    def __call__(self, sheet: dict) -> dict[str, float]:
        self.q = sheet
        self.n = {letter: value for letter, value in sheet.items() if len(letter) == 1}
        self.title = {"gpt2": "GPT-2", "llama": "Llama"}[sheet["style"]]
        self.N, self.W, kept = self.parameters(), self.weights(), self.kept()
        bf16 = self.seconds(fp8=False)
        return {"parameters": self.N, "states": self.states(), "activations": kept,
                "peak": self.peak(kept),
                "flops": self.flops(), "seconds": bf16, "gain": bf16 / self.seconds(fp8=True),
                "noise": self.noise(),
                "moved": self.moved(), "sent": self.sent(), "cache": self.cache()}

    def terms(self, cell: str, table: int = 0, name: str = "") -> dict[str, float]:
        return {row: evaluated(text, self.n) for row, text in self.tables[cell].column(table,
            name or self.title).items()}

    @property
    def slots(self) -> int:
        return {"adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}[self.q["optimizer"]]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Of a block: inputs and outputs."""
        q = self.q
        D, F, heads = q["D"], q["F"], q["H"] * q["E"]
        first = ("mlp.up", F) if q["style"] == "gpt2" else ("mlp.gate_up", 2 * F)
        return {"attention.qkv": (D, heads + 2 * q["G"] * q["E"]), "attention.out": (heads, D),
                first[0]: (D, first[1]), "mlp.down": (F, D)}

    def weights(self) -> int:
        return (self.q["L"] * sum(K * N for K, N in self.linears.values()) + self.q["V"]
                * self.q["D"])

    # 01

    @printed("memory-formula-0", "then the last term is 0")
    def parameters(self) -> float:
        rows = self.terms("memory-formula-1")
        return sum(rows.values()) - (rows["head"] if self.q["tied"] and self.q["style"] == "llama"
                                     else 0)

    @printed("memory-formula-2",
             r"\underbrace{4 N}_{\text{weights}} + \underbrace{4 N}_{\text{gradients}} + "
             r"\underbrace{4 s N}_{\text{optimizer}}",
             "AdamW 2, Lion and\nmomentum 1, plain SGD 0")
    def states(self) -> float:
        return 4 * self.N + 4 * self.N + 4 * self.slots * self.N

    @printed("memory-formula-4", "A block's rows count `L` times, the other rows once",
             "`2 B T K` bytes for each Linear", "`4 B T D`")
    def kept(self) -> float:
        q, (first, name) = self.q, {"gpt2": (0, "bf16"), "llama": (2, "bf16")}[self.q["style"]]
        if q["precision"] == "fp32":
            name = "fp32"
        block, outside = (self.terms("memory-formula-3", first + i, name) for i in (0, 1))
        if q["precision"].startswith(("fp8", "mxfp8")):
            block |= {linear: 2 * q["B"] * q["T"] * K for linear, (K, _) in self.linears.items()}
        inside = 4 * q["B"] * q["T"] * q["D"] if q["recompute"] == "block" else sum(block.values())
        return q["L"] * inside + sum(outside.values())

    @printed("memory-formula-4", "`c = 2 W`", "`c = 2 V D`", "`c = 0`",
             r"\text{peak} = 4 N + 4 s N + A + c + \underbrace{8 B T V}_{\text{two gradients}} + "
             r"16 B T")
    def peak(self, kept: float) -> float:
        q = self.q
        copies = (0 if q["precision"] == "fp32" else 2 * q["V"] * q["D"]
                  if q["recompute"] == "block" else 2 * self.W)
        return (4 * self.N + 4 * self.slots * self.N + kept + copies + 8 * q["B"] * q["T"] * q["V"]
                + 16 * q["B"] * q["T"])

    # 02

    @printed("time-formula-0", "a step takes three times the sum")
    def flops(self) -> float:
        return 3 * sum(self.terms("time-formula-1").values())

    # 03, 04 and 06

    @printed("formats-formula-0",
             r"\int_{|x| < s/2} x^2 \, p(x) \, dx + \int_{|x| \ge s/2} \frac{d(x)^2}{12} \, p(x) "
             r"\, dx",
             r"d(x) = 2^{\max( \lfloor \log_2 |x| \rfloor, \; e_{\min}) - m}",
             r"s = 2^{e_{\min} - m}",
             r"\sigma = \frac{\text{largest}}{\text{crest}}", "sqrt(2 ln n)",
             "| E4M3 | 3 | -6 | 448 |",
             "| E5M2 | 2 | -14 | 57,344 |")
    def cast_noise(self, fmt: str, crest: float) -> float:
        m, least, largest = {"e4m3fn": (3, -6, 448), "e5m2": (2, -14, 57_344)}[fmt]
        sigma, smallest, steps, total = largest / crest, 2.0 ** (least - m), 4000, 0.0
        for i in range(steps):
            z = 6 * (i + 0.5) / steps
            x, density = z * sigma, 2 * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * 6 / steps
            error = (x * x if x < smallest / 2
                     else 4.0 ** (max(math.floor(math.log2(x)), least) - m) / 12)
            total += error * density
        return total / sigma**2

    @printed("fp8-formula-0", r"-10 \log_{10} \left( \tfrac{2}{3} \, (n_x + n_w + n_{dy}) \right)")
    def noise(self) -> float:
        recipe, tokens = self.recipe(), self.q["B"] * self.q["T"]
        crest = math.sqrt(2 * math.log(recipe["block of x"][1] or tokens * self.q["D"]))
        x, dy = self.cast_noise(recipe["x and w"], crest), self.cast_noise(recipe["dy"], crest)
        return -10 * math.log10(2 / 3 * (x + x + dy))

    def recipe(self) -> dict:
        """A row of the table of 06."""
        heads, *rows = self.tables["fp8-formula-2"].tables[0]
        row = dict(zip(heads, next(row for row in rows if row[0] == self.q["recipe"])))
        x, w = row["elements per scale: x, dy"], row["elements per scale: w"]
        sides = lambda text: tuple(0 if side == "all" else int(side)
                                   for side in ("all x all" if text == "all"
                                                else text).split(" x "))
        return {**row, "block of x": sides(x), "block of w": sides(w),
                "both": row["one cast for both layouts"],
                "scale": float(row["bytes of a scale"]),
                "share": float(row["share of the dtype's speed"])}

    # 09, and casts of 06

    @printed("rent-formula-0",
             r"t_{\text{product}} = \max\left( \max\left( \frac{2 M N K}{P}, \; \frac{2 (M K + K "
             r"N)}{Q} \right) + \frac{2 M N}{Q} + t_0, \; k \right)")
    def product(self, M: int, N: int, K: int, peak: float, itemsize: int = 2) -> float:
        return max(max(2 * M * N * K / peak, itemsize * (M * K + K * N) / self.Q) + 2 * M * N
                   / self.Q + self.start, self.k)

    @printed("rent-formula-0", "`(M, N, K)`, `(M, K, N)` and `(N, K, M)`, with `M = B T`")
    def three(self, K: int, N: int, peak: float, itemsize: int = 2) -> list[float]:
        M = self.q["B"] * self.q["T"]
        return [self.product(*sizes, peak, itemsize) for sizes in ((M, N, K), (M, K, N), (N, K, M))]

    @printed("fp8-formula-1", r"\frac{1}{\text{share}} \sum_{y, \, dx, \, dw} t_{\text{product}} + "
                              r"\sum_{\text{passes}}",
             r"\max\left( \frac{\text{bytes}}{Q}, \; t_{\text{kernel}} \right)",
             "`x` (M, K) and `dy` (M, N) read 2 bytes per number, and the cast of\n"
             "`w` (N, K) reads 4 bytes",
             "A cast that produces both layouts reads once and writes twice",
             "If more than 65,536 numbers share a scale", "one pass of 0 bytes",
                              "32 times the length of a block",
             "Operands take one byte per number, and results take two bytes")
    def fp8_linear(self, K: int, N: int) -> float:
        M, recipe = self.q["B"] * self.q["T"], self.recipe()
        passes = []
        for name, rows, columns, read in (("x", M, K, 2), ("w", N, K, 4), ("dy", M, N, 2)):
            block = recipe["block of w" if name == "w" else "block of x"]
            for down, (high, wide) in enumerate(((rows, columns), (columns, rows))):
                tall, long = block[0] or high, block[1] or wide
                if max(tall, 32 if down else 1) * long > 65_536:
                    passes += [rows * columns * read, 0]
                written = (rows * columns + math.ceil(high / tall) * math.ceil(wide / long)
                           * recipe["scale"])
                if name in recipe["both"].replace(",", "").split():
                    passes.append(rows * columns * read + 2 * written)
                    break
                passes.append(rows * columns * read + written)
        casts = sum(max(nbytes / self.Q, self.k) for nbytes in passes)
        return (sum(self.three(K, N, self.fp8_share * self.q["fp8_flops"], 1)) / recipe["share"]
                + casts)

    @printed("rent-formula-0", "`4 B T² D` FLOPs over half of the pairs, `(T + 1) / 2 T`",
             "backward takes 2.5 times that",
             "the products, attention and passes of the forward pass of each recomputed block",
             "backward moves 1.5 times as much",
             "`2 (2 + 4)` bytes a weight", "`12 + 8 s` bytes a parameter")
    def seconds(self, *, fp8: bool) -> float:
        q = self.q
        shares = self.tables["rent-formula-1"].column(0, q["machine"])
        peak, self.fp8_share, attention, bandwidth, fused, start, kernel = map(float,
            shares.values())
        peak *= q["bf16_flops"]
        self.Q, self.start, self.k = bandwidth * q["bytes_per_second"], start / 1e6, kernel / 1e6
        forward = backward = 0.0
        for K, N in self.linears.values():
            y, dx, dw = [self.fp8_linear(K, N) / 3] * 3 if fp8 else self.three(K, N, peak)
            forward, backward = forward + y, backward + dx + dw
        pairs = (4 * q["B"] * q["T"] ** 2 * q["D"] * (q["T"] + 1) / (2 * q["T"])
                 / (attention * q["bf16_flops"]))
        inside, outside = (fused * sum(self.terms("rent-formula-1", table).values()) / self.Q
                           for table in (1, 2))
        forward, backward = forward + pairs + inside, backward + 2.5 * pairs + 1.5 * inside
        again = forward if q["recompute"] == "block" else 0
        head = sum(self.three(q["D"], q["V"], peak)) + 2.5 * outside
        copies = 2 * (2 + 4) * sum(K * N for K, N in self.linears.values()) / self.Q
        return (q["L"] * (forward + backward + again + copies) + head + (12 + 8 * self.slots)
                * self.N / self.Q)

    # 10, 12 and 14

    @printed("kernels-09", "x, code = 4, 1 ",
             '"operation after operation": (5 * x + code, 3 * x + 2 * code)',
             '"amax, and two casts": (3 * x, 2 * code)',
             '"amax, and one cast to both": (2 * x, 2 * code)',
             '"one kernel, the amax of the step before": (x, 2 * code)')
    def moved(self) -> float:
        x, code = 4, 1
        each = {"operation after operation": 5 * x + code + 3 * x + 2 * code,
                "amax, and two casts": 3 * x + 2 * code,
                "amax, and one cast to both": 2 * x + 2 * code,
                "one kernel, the amax of the step before": x + 2 * code}
        return each[self.q["cast"]] * self.q["B"] * self.q["T"] * self.q["D"]

    @printed("zero-formula-0", r"\text{reduce-scatter} = \text{all-gather} = \frac{R - 1}{R} \, "
                               r"\text{bytes}")
    @printed("zero-08", "With ZeRO 0, ranks all-reduce the gradients. With ZeRO 1, each rank "
                        "reduce-scatters the gradients, updates its part of the weights, and "
                        "all-gathers the new weights.",
             "they gather the weights for forward. ZeRO 3 frees the weights of each block after "
             "its forward and gathers them again for backward")
    @printed("zero-22", "Every micro-batch sends all of these messages.")
    def sent(self) -> float:
        q = self.q
        rounds = 3 * q["micro_batches"] if q["zero"] == 3 else 2
        return rounds * (q["ranks"] - 1) / q["ranks"] * 4 * self.N

    @printed("flash-cache-formula",
             r"\text{cache}(t) = 2 \, L \, G \, E \, t \times \text{bytes of a number}")
    def cache(self) -> float:
        q = self.q
        return 2 * q["L"] * q["G"] * q["E"] * q["T"] * 2 * q["B"]
