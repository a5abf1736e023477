"""How much is measured: everything, or a quick look."""

from dataclasses import dataclass

COVERAGES = (0, 50, 100)


@dataclass(frozen=True)
class Plan:
    """`memory`: bytes that are touched before. `queries`: tokens -> (rounds, distinct queries in a round)."""

    quick: bool
    memory: int
    tables: tuple[int, ...]
    queries: dict[int, tuple[int, int]]
    thread_rounds: int
    pages: int
    rpc_calls: int
    rpc_chunks: int
    replica_chunks: int
    cpu_calls: int
    ready_chunks: int
    visible_documents: int
    churn_base: int
    churn_cycles: int
    documents: int

    @property
    def largest(self) -> int:
        return self.tables[-1]


FULL = Plan(
    quick=False,
    memory=6 << 30,
    tables=(10_000, 100_000, 800_000),
    queries={1 << 10: (15, 9), 1 << 13: (13, 7), 1 << 17: (13, 4), 1 << 20: (5, 2)},
    thread_rounds=15,
    pages=400,
    rpc_calls=400,
    rpc_chunks=800_000,
    replica_chunks=100_000,
    cpu_calls=60,
    ready_chunks=1_000_000,
    visible_documents=300,
    churn_base=100_000,
    churn_cycles=10_000_000,
    documents=2000,
)

QUICK = Plan(
    quick=True,
    memory=1 << 28,
    tables=(10_000, 50_000),
    queries={1 << 10: (2, 3), 1 << 13: (2, 3), 1 << 17: (2, 2)},
    thread_rounds=3,
    pages=20,
    rpc_calls=40,
    rpc_chunks=20_000,
    replica_chunks=10_000,
    cpu_calls=6,
    ready_chunks=20_000,
    visible_documents=30,
    churn_base=10_000,
    churn_cycles=100_000,
    documents=200,
)
