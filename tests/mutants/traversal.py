"""Defects of the rule for drawn trees, and of those who draw them."""

from catalogue import UNIT, Mutant

EXACT = "tests/statistical/test_exactness.py"
TREES = "tests/statistical/test_trees_of_guesses.py"
LAW = f"{EXACT}::test_traversal_keeps_the_joint_law_of_trees"
REFERENCE = f"{UNIT}/acceptance/test_traversal.py::test_traversal_is_its_reference"
NEXT_LEVEL = f"{UNIT}/drafters/test_next_level.py"
DRAWN = f"{TREES}::test_drawn_trees_keep_the_law"

TRAVERSAL_MUTANTS = (
    Mutant(
        40,
        "a second sibling is judged by the target's distribution as it was before the first",
        "acceptance/rules/traversal.py",
        "return Rest(self.ids, left / spare, spare /",
        "return Rest(self.ids, self.probs, spare /",
        (LAW,),
    ),
    Mutant(
        40,
        "a refused child does not change what its parent can carry",
        "acceptance/rules/traversal.py",
        "spare / (spare + (1 - self.carried)))",
        "self.carried)",
        (LAW,),
    ),
    Mutant(
        40,
        "a child carries its ratio alone, not its parent's share of it",
        "acceptance/rules/traversal.py",
        "min(1.0, self.carried * float(self.probs[slot]) / q)",
        "min(1.0, float(self.probs[slot]) / q)",
        (LAW,),
    ),
    Mutant(
        40,
        "nodes are judged level by level, the deepest first",
        "acceptance/rules/traversal.py",
        "    return backwards[::-1]\n",
        "    return sorted(backwards, reverse=True)\n",
        (LAW,),
    ),
    Mutant(
        40,
        "children are judged in the wrong order",
        "acceptance/rules/traversal.py",
        "        open_rows += below[row - root]",
        "        open_rows += below[row - root][::-1]",
        (LAW,),
    ),
    Mutant(
        40,
        "a parent is judged before its children",
        "acceptance/rules/traversal.py",
        "    return backwards[::-1]\n",
        "    return [*sorted(backwards[1:]), root]\n",
        (LAW,),
    ),
    Mutant(
        28,
        "nodes of one depth are accepted by the same uniform",
        "acceptance/judge.py",
        "uniforms(branched(accept_keys, trees.branches))",
        "uniforms(accept_keys)",
        (REFERENCE,),
    ),
    Mutant(
        28,
        "nodes of one depth are drawn after with the same noise",
        "drafters/model/guessed_tree.py",
        "keys(self.positions(), np.arange(len(self.frontier)))",
        "keys(self.positions())",
        (f"{NEXT_LEVEL}::test_cousins_are_drawn_with_noise_of_their_own",),
    ),
    Mutant(
        24,
        "siblings without replacement are told as if with it",
        "drafters/model/next_level.py",
        "        left[slot] = 0.0\n",
        "",
        (f"{NEXT_LEVEL}::test_siblings_are_different_and_each_tells_what_was_left_to_draw_from", DRAWN),
    ),
    Mutant(
        24,
        "a tree for traversal is ranked as for coupled and tells no q: exact, and a waste",
        "drafters/model/next_level.py",
        'if sampling.rule is Rule.TRAVERSAL and sampling.record["temperature"] > 0:',
        "if False:",
        (NEXT_LEVEL,),
    ),
    Mutant(
        43,
        "the node budget goes to the siblings that look best once they are drawn",
        "drafters/model/next_level.py",
        "level += [(0.0, node, token, q) for token, q in siblings]",
        "level += [(q.prob(token), node, token, q) for token, q in siblings]",
        (DRAWN,),
    ),
    Mutant(
        43,
        "a drafter that ranks by what was drawn is judged by traversal",
        "engine/guessing/drafter_pool.py",
        ", is_fixed=config.fixes_trees)",
        ")",
        (
            "tests/integration/test_drafters_under_rules.py"
            "::test_trees_ranked_by_what_was_drawn_are_refused_for_traversal",
        ),
    ),
)
