# Needs: a model and examples. Makes: for each run a row of figures, its steps, and an adapter.


rule check_parity:
    """Before a study trusts them: do both engines, as installed here, solve the same problem?"""
    input:
        code=code_of("check_parity"),
    output:
        report="<results>/parity.md",
    log:
        "<logs>/check_parity/all.log",
    conda:
        "../envs/parity.yaml"
    resources:
        training=1,
    script:
        "../workflow_scripts/check_parity.py"


rule train_torch:
    """One LoRA training run with PyTorch, TRL and PEFT."""
    input:
        **inputs_of_run,
        code=code_of("train_torch", "lib/torch_lora"),
    output:
        **outputs_of_run,
    log:
        "<logs>/train_torch/{backend}/{model}/{context}/{variant}.log",
    benchmark:
        "<benchmarks>/train_torch/{backend}/{model}/{context}/{variant}.tsv"
    wildcard_constraints:
        backend=backends_on("torch"),
    conda:
        "../envs/torch.yaml"
    resources:
        training=1,
    params:
        run=settings_of_run,
        limits=limits_of_run,
        state=state_of_run,
    script:
        "../workflow_scripts/train_torch.py"


rule train_mlx:
    """One LoRA training run with Apple MLX and mlx-lm."""
    input:
        **inputs_of_run,
        code=code_of("train_mlx", "lib/mlx_lora"),
    output:
        **outputs_of_run,
    log:
        "<logs>/train_mlx/{backend}/{model}/{context}/{variant}.log",
    benchmark:
        "<benchmarks>/train_mlx/{backend}/{model}/{context}/{variant}.tsv"
    wildcard_constraints:
        backend=backends_on("mlx"),
    conda:
        "../envs/mlx.yaml"
    resources:
        training=1,
    params:
        run=settings_of_run,
        limits=limits_of_run,
        state=state_of_run,
    script:
        "../workflow_scripts/train_mlx.py"
