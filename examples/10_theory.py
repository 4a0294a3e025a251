"""What speculation should bring, before anything is built: from acceptance and cost alone."""

from foreword.bench.theory import DraftingCost, best, predict

for alpha in (0.5, 0.7, 0.9):
    found = best(predict(alpha, DraftingCost(level_cost=0.05), depths=range(1, 16)))
    print(
        f"acceptance {alpha:.0%}: {found.k} draft tokens per pass, {found.tokens_per_pass:.2f} tokens, "
        f"{found.speedup:.2f} times as fast; a gain from {found.break_even:.0%} on"
    )
