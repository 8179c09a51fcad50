"""How the suite compiles on a CPU, in its own process and in programs that it starts. No jax: it is read before it."""

# A kernel is made of LLVM directly instead of through MLIR, and not optimised: half the time to compile a step. The
# cores have enough to do with other tests, so a program isn't split for them either: a sixth of the work less. A sum
# is one kernel, not a tree of them: a tenth. Where level 1 is asked for, it does without what costs a third of it and
# makes no step of tiny models quicker.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,"
    "xla_cpu_disable_slp_vectorizer,xla_cpu_disable_loop_unrolling,xla_cpu_optimize_for_size "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=tree_reduction_rewriter"
)
MANY_STEPS = QUICK.replace("level=0", "level=1")  # for programs that run for longer than they compile
