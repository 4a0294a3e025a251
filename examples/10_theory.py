"""Predict the speed-up of speculative decoding from acceptance and cost alone."""

from foreword.bench.theory import DraftingCost, best, predict

for alpha in (0.5, 0.7, 0.9):
    prediction = best(predict(alpha, DraftingCost(level_cost=0.05), depths=range(1, 16)))
    print(
        f"acceptance {alpha:.0%}: {prediction.k} draft tokens per pass, {prediction.tokens_per_pass:.2f} tokens, "
        f"{prediction.speedup:.2f} times as fast; faster from an acceptance of {prediction.break_even:.0%} on"
    )
