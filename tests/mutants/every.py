"""All bugs that `make mutants` puts in."""

from catalogue import MUTANTS, Mutant
from chains import CHAIN_MUTANTS
from cluster import CLUSTER_MUTANTS
from control import CONTROL_MUTANTS
from cpu_backend import CPU_BACKEND_MUTANTS
from early import EARLY_MUTANTS
from ends import END_MUTANTS
from engine import ENGINE_MUTANTS
from families import FAMILY_MUTANTS
from gpu_families import GPU_FAMILY_MUTANTS
from gpu_kernels import GPU_KERNEL_MUTANTS
from grammars import GRAMMAR_MUTANTS
from heads import HEAD_MUTANTS
from house import HOUSE_MUTANTS
from hybrids import HYBRID_MUTANTS
from learning import LEARNING_MUTANTS
from operations import OPERATION_MUTANTS
from parallel_heads import PARALLEL_HEAD_MUTANTS
from pending import PENDING_MUTANTS
from predictions import PREDICTION_MUTANTS
from preparing import PREPARING_MUTANTS
from rollouts import ROLLOUT_MUTANTS
from server_proofs import SERVER_PROOF_MUTANTS
from service import SERVICE_MUTANTS
from serving import SERVING_MUTANTS
from simulator import SIMULATOR_MUTANTS
from sparse import SPARSE_MUTANTS
from training import TRAINING_MUTANTS
from traversal import TRAVERSAL_MUTANTS
from waits import WAIT_MUTANTS
from windows import WINDOW_MUTANTS

EVERY_MUTANT: tuple[Mutant, ...] = (
    *MUTANTS,
    *ENGINE_MUTANTS,
    *END_MUTANTS,
    *EARLY_MUTANTS,
    *CHAIN_MUTANTS,
    *HOUSE_MUTANTS,
    *PENDING_MUTANTS,
    *PREDICTION_MUTANTS,
    *TRAVERSAL_MUTANTS,
    *WINDOW_MUTANTS,
    *HEAD_MUTANTS,
    *PARALLEL_HEAD_MUTANTS,
    *CPU_BACKEND_MUTANTS,
    *GPU_KERNEL_MUTANTS,
    *GPU_FAMILY_MUTANTS,
    *PREPARING_MUTANTS,
    *ROLLOUT_MUTANTS,
    *CONTROL_MUTANTS,
    *SERVER_PROOF_MUTANTS,
    *SERVICE_MUTANTS,
    *SERVING_MUTANTS,
    *GRAMMAR_MUTANTS,
    *FAMILY_MUTANTS,
    *HYBRID_MUTANTS,
    *CLUSTER_MUTANTS,
    *WAIT_MUTANTS,
    *SIMULATOR_MUTANTS,
    *SPARSE_MUTANTS,
    *TRAINING_MUTANTS,
    *LEARNING_MUTANTS,
    *OPERATION_MUTANTS,
)
