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
        "Residual.without",
        "weights / mass",
        "self.probs",
        (LAW,),
    ),
    Mutant(
        40,
        "a refused child does not change what its parent can carry",
        "acceptance/rules/traversal.py",
        "Residual.without",
        "mass / (mass + (1 - self.carried))",
        "self.carried",
        (LAW,),
    ),
    Mutant(
        40,
        "a child carries its ratio alone, not its parent's share of it",
        "acceptance/rules/traversal.py",
        "Residual.chance",
        "self.carried * float(self.probs[slot])",
        "float(self.probs[slot])",
        (LAW,),
    ),
    Mutant(
        40,
        "nodes are judged level by level, the deepest first",
        "acceptance/rules/traversal.py",
        "visits",
        "reversed_visits[::-1]",
        "sorted(reversed_visits, reverse=True)",
        (LAW,),
    ),
    Mutant(
        40,
        "children are judged in the wrong order",
        "acceptance/rules/traversal.py",
        "visits",
        "children_of[row - root]",
        "children_of[row - root][::-1]",
        (LAW,),
    ),
    Mutant(
        40,
        "a parent is judged before its children",
        "acceptance/rules/traversal.py",
        "visits",
        "reversed_visits[::-1]",
        "[*sorted(reversed_visits[1:]), root]",
        (LAW,),
    ),
    Mutant(
        28,
        "nodes of one depth are accepted by the same uniform",
        "acceptance/judge.py",
        "_run_other_rules",
        "branch_keys(accept_keys, trees.branches)",
        "accept_keys",
        (REFERENCE,),
    ),
    Mutant(
        28,
        "nodes of one depth are drawn after with the same noise",
        "drafters/trees.py",
        "GrowingTree.keys",
        "self.request.sampling.keys(self.positions(), np.arange(len(self.frontier)))",
        "self.request.sampling.keys(self.positions())",
        (f"{NEXT_LEVEL}::test_cousins_are_drawn_with_noise_of_their_own",),
    ),
    Mutant(
        24,
        "siblings without replacement are told as if with it",
        "drafters/next_level.py",
        "draw_siblings",
        "remaining[index] = 0.0",
        "",
        (f"{NEXT_LEVEL}::test_siblings_are_different_and_each_tells_what_was_left_to_draw_from", DRAWN),
    ),
    Mutant(
        24,
        "a tree for traversal is ranked as for coupled and tells no q: exact, and a waste",
        "drafters/next_level.py",
        "grow_trees",
        "sampling.rule is Rule.TRAVERSAL and sampling.record['temperature'] > 0",
        "False",
        (NEXT_LEVEL,),
    ),
    Mutant(
        43,
        "the node budget goes to the siblings that look best once they are drawn",
        "drafters/next_level.py",
        "grow_drawn",
        "0.0",
        "q.prob(token)",
        (DRAWN,),
    ),
    Mutant(
        43,
        "a drafter that ranks by what was drawn is judged by traversal",
        "engine/drafting/drafter_pool.py",
        "DrafterPool._plan_of",
        "check_exact(self._rule, is_chain=not config.makes_trees, is_fixed=config.fixes_trees)",
        "check_exact(self._rule, is_chain=not config.makes_trees)",
        (
            "tests/integration/test_drafters_under_rules.py"
            "::test_trees_ranked_by_what_was_drawn_are_refused_for_traversal",
        ),
    ),
)
