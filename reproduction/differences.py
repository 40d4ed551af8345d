"""Sentences on differences, by hand: true for the numbers in results/ that are committed."""

from __future__ import annotations

HEADLINES = """**Less time**: cumulative seconds at equal documents, sorted, until the first of the
two ends. "Up to" is over the paper's four strategies (it left ColossalZ out), as the paper's
figures are: against the *slowest* choice. "Over the best" is against the single strategy that
is hardest to beat: of those that train furthest, the fastest. **Longer sequences**: the longest
that fits, over the strategy that ends first, as the paper's figures are, and over the one that
ends last; "in the data": the longest document that trained, over the strategy's. As published
is compared with strategies with Megatron's own head, ours with the head in tiles.

Measured: 16 documents a panel, of lengths times 1/64 and 1/128, memory at which the fastest
strategy would end at 0.425 of the longest. None is drawn between 392 (784) tokens and the longest,
so a measured extension only says that the longest document trained; METP alone trains it too, and
takes 1.7 to 2.0 times ParaDySe's time for all documents. Up to 392 (784) tokens MegatronTS is the
fastest single strategy of every panel, and ParaDySe equals it within the noise: 0.94 to 1.04 of its
time over panels and orders. On LLaMA it ran the very plan of MegatronTS (0.94 to 1.03), and
MegatronTS alone differs by up to 6% between the two orders of the same documents. The others take
1.14 to 2.5 times ParaDySe's time. As published runs out of memory on the longest document of LLaMA
and GPT. At this scale its head is in tiles too."""

CHECK = """At the lengths of all documents and at others 2% apart up to the longest that any single
strategy fits. Ours holds by construction where costs are known exactly, as here: a single
strategy is one of the plans that the exact planner chooses from. The published one's forest is
a step function, and its smoothing keeps a plan that is up to 5% slower by its own estimate. At
one of BERT's lengths its plan does not fit where a single strategy does."""

CROSSOVERS = """Lengths 2% apart, so a crossover lies between two neighbouring numbers. Without a
limit of memory only one is left, MegatronTS to UlyssesZ: MegatronCZ and METP are chosen for
memory alone. The paper gives no crossovers in numbers."""

TABLE5 = """Share of time that the whole framework saves until the length at which the other ends,
95% interval over documents (bootstrap: costs are simulated and do not vary, documents do), and
the longest sequence that trains. The paper's reach is the longest document of its data that
trained. Measured, both rows of as published are compared with the whole of ours, up to where as
published ends; with smoothing and without it ran the same plans."""

CONTRIBUTIONS = """The same in every panel. "Faster": the interval lies above 0.1% of the time.
MegatronCZ does not help beside the other strategies, and ColossalZ by 0.2% of the time in one
panel: without them every length still trains. The forest does not help our fit, whose laws describe
the simulator's bytes and seconds exactly enough; measured costs are another matter
(docs/cost-model.md). Smoothing, off by default, costs ours time and buys nothing where a switch is
free; as published it saves 0.2% to 0.7%. For BERT everything is within 4%, because its documents
fit every strategy but ColossalZ."""

CASE_STUDY = """The paper sums its parts to about 31 s (imports 2 to 3). A turn of two strategies
is compared with pairs of each; a median below 0 is noise, and counts as 0 in the switch. Choosing
is a plan by cost for a length not seen before; for one that has been seen it is a microsecond."""

RESTARTS = """Simulated: if each document ran under the fastest of the five single strategies that
fits, how often would the strategy change in shuffled order, and what would restarts of the
paper's 31 s add? Documents that only ParaDySe can train are left out."""

TABLE3 = """K = 1,024. GRCh38's published shares sum to 99.1%."""

PEER = """Estimated, not run. Megatron-core 0.19's own `BalancedCPScheduler` assigns the same
documents, shuffled, in global batches of 100, to 1, 2, 4 or 8 of the 8 ranks; a document on c
ranks is priced by what this package's balanced ring (MegatronCZ) is simulated to take for p = c
on a network without latency and without limit of rate: all communication of the peer is free,
as are its barriers, gradients and optimizer. Every rank holds the whole model: 6 bytes a
parameter (weights and float32 gradients) and 12/8 of optimizer state (a distributed optimizer).
Against the peer count only the host's 40 us a collective and, in memory, the ring's gathered
copy of a layer's weights. What a rank may hold of a document is what fits, or a half, a
quarter, an eighth of that, whichever is fastest. ParaDySe takes one document after the other on
all 8 ranks, and its communication is paid for. Documents that the peer cannot fit are left out
of both. The GPT's 105.6 GiB of state fit no rank without tensor parallelism, which is not
priced. Where the peer does not recompute, waiting for the slowest rank of a group is at least
95% of the difference. Megatron has this scheduler for GPTs; BERT is priced as if it had it."""

SENTENCES: dict[str, str] = {
    "reduction:bert:githubcode:paradyse": (
        "The slowest is METP on short documents, by its fixed time: 1.14 s a sequence "
        "simulated, 1.37 s in the authors' fits of their measurements. With those fits on our"
        " documents the saving is 84.6% (authors_fits.csv). Against the best single strategy "
        "little is left: MegatronTS and UlyssesZ fit every document of BERT, and one of the two "
        "is nearly always the fastest."
    ),
    "reduction:bert:githubcode:paradyse-as-published": (
        "The same cause. Less over MegatronTS alone than ours: forest and smoothing choose "
        "up to 11% slower plans at single lengths."
    ),
    "reduction:bert:grch38:paradyse": (
        "The slowest is METP on short documents, by its fixed time: 1.14 s a sequence "
        "simulated, 1.37 s in the authors' fits of their measurements. With those fits on our"
        " documents the saving is 62.7%. Against the best single strategy nearly nothing is "
        "left: UlyssesZ alone fits every document of BERT and is nearly always the fastest."
    ),
    "reduction:bert:grch38:paradyse-as-published": (
        "The same cause; 0.5% slower than UlyssesZ alone."
    ),
    "reduction:llama:githubcode:paradyse": (
        "No figure in the paper. Only METP and strategies that recompute train all documents."
    ),
    "reduction:llama:grch38:paradyse": (
        "No figure in the paper. Only METP and strategies that recompute reach beyond 251,968"
        " tokens."
    ),
    "reduction:gpt:githubcode:paradyse": (
        "No figure in the paper. Against METP 43.3%, at more documents than against MegatronCZ."
    ),
    "reduction:llama:githubcode:paradyse-as-published": ("As above."),
    "reduction:llama:grch38:paradyse-as-published": ("As above."),
    "reduction:gpt:githubcode:paradyse-as-published": (
        "No figure in the paper. More than ours, because it ends before the longest "
        "documents, where METP loses less."
    ),
    "reduction:gpt:grch38:paradyse-as-published": ("No figure in the paper. "),
    "reduction:gpt:grch38:paradyse": (
        "No figure in the paper. With recomputation MegatronTS, UlyssesZ and METP alone train "
        "all documents; MegatronTS+recompute takes the least time of the three."
    ),
    "extension:bert:githubcode:paradyse": (
        "No figure in the paper. All documents fit every strategy: nothing in the data is gained."
    ),
    "extension:bert:grch38:paradyse": ("No figure in the paper. As for GitHubCode."),
    "extension:bert:githubcode:paradyse-as-published": ("No figure in the paper. METP's limit."),
    "extension:bert:grch38:paradyse-as-published": ("No figure in the paper. As for GitHubCode."),
    "extension:llama:githubcode:paradyse": (
        "No figure in the paper. 12.6% further than METP+recompute alone."
    ),
    "extension:llama:grch38:paradyse": ("No figure in the paper. As for GitHubCode."),
    "extension:gpt:githubcode:paradyse": (
        "Recomputation and tiles, which the paper's strategies lack; 13.4% further than "
        "METP+recompute alone. The data end at 270,652 tokens here."
    ),
    "extension:gpt:githubcode:paradyse-as-published": (
        "139.1% against 144.16% by what fits; by documents 59.3%, as our 400 hold none "
        "between 160,250 and 259,927 tokens. It reaches no further than METP alone, as a plan"
        " of METP on all layers is its last resort."
    ),
    "extension:gpt:grch38:paradyse": ("As for GitHubCode."),
    "extension:gpt:grch38:paradyse-as-published": (
        "The published head holds logits of the whole sequence and ends METP at 242,688 "
        "tokens; in tiles METP alone reaches 322,944. The paper's GRCh38 has 3-mer tokens, so"
        " a head of some dozens of columns, where ours has 50,257 throughout: likely why it "
        "reached 329,728. Open: not simulated with that vocabulary."
    ),
    "extension:llama:githubcode:paradyse-as-published": (
        "No figure in the paper. Exactly METP's limit; the paper saw LLaMA end slightly below"
        " the best single strategy."
    ),
    "extension:llama:grch38:paradyse-as-published": ("As for GitHubCode."),
    "table5:full": (
        "Ours reaches 2.9 times the paper's by recomputation and tiles; as published see the "
        "headlines on the head."
    ),
    "table5:without MegatronTS": (
        "Agrees in kind: the part that saves most. Less here, as simulated fixed costs of the"
        " others on short documents are smaller than measured ones (docs/simulator.md)."
    ),
    "table5:without MegatronCZ": ("Agrees: it does not help."),
    "table5:without UlyssesZ": ("Agrees in size."),
    "table5:without METP": (
        "Agrees: without it the reach falls, to 123,584 here (MegatronCZ's limit) and 112,128"
        " there; ours falls to 751,552, as others recompute."
    ),
    "table5:without forest": (
        "Differs: simulated costs are smooth, so polynomials lose nothing. The paper's "
        "measured ones are not."
    ),
    "table5:without smoothing": (
        "Both save next to nothing. Ours has none, because a switch costs nothing."
    ),
}

OPEN = (
    (
        "- Ours is without `+offload`, as the paper's framework has nothing like it: with inputs "
        "of layers in host memory sequences get longer still (docs/memory.md)."
    ),
    (
        "- No GPU ran: every simulated figure rests on datasheet rates (docs/simulator.md "
        "says how far off they are: 8% in the median, 34% at 8K)."
    ),
    (
        "- As published is not the authors' code: what it keeps of ours is listed in "
        "docs/reproduction.md."
    ),
    (
        "- The paper does not say at which lengths it profiled. Its fit is given 32 per "
        "strategy, up to the longest that fits. Given the 10 or 11 simulated lengths, far "
        "beyond what fits, it reaches less far in five of six panels and takes up to 2% longer: "
        'the row "profiled at few lengths" of the table above.'
    ),
    (
        "- Bytes of state a parameter (16), reserve (5%) and vocabularies of the paper's runs"
        " are not known."
    ),
    (
        "- 400 documents a panel, drawn log-uniformly inside the published buckets: few "
        "beyond 128K, and the longest of ours are shorter than the published maxima."
    ),
    ("- Seconds are without the optimizer step, the same for all."),
)


def sentence(key: str) -> str:
    """Of one row; empty where the paper gives no figure to differ from."""
    return SENTENCES.get(key, "")
