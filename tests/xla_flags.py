"""How the suite compiles on a CPU, in its own process and in programs that it starts. No jax: it is read before it."""

# A kernel is made of LLVM directly instead of through MLIR, and not optimised: half the time to compile a step.
QUICK = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
