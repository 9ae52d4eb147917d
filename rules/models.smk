# Needs: a model's source. Makes: an ordinary Hugging Face folder, its quantized form for MLX, and
# where the adapters on it start.


rule fetch_model:
    """Fetch a model from the hub, or take one from a folder on disk: safetensors only, no code."""
    input:
        code=code_of("fetch_model"),
    output:
        model=directory("<results>/models/{model}"),
    log:
        "<logs>/fetch_model/{model}.log",
    wildcard_constraints:
        model=models_from("hub", "path"),
    conda:
        "../envs/data.yaml"
    params:
        source=lambda wildcards: keys(
            study.models[wildcards.model], "source", "repo", "revision", "path"
        ),
    script:
        "../workflow_scripts/fetch_model.py"


rule make_model:
    """Make a Qwen 2 model of a given shape with seeded weights, its tokenizer trained on the study."""
    input:
        sessions=rules.split_sessions.output.train,
        code=code_of("make_model"),
    output:
        model=directory("<results>/models/{model}"),
    log:
        "<logs>/make_model/{model}.log",
    wildcard_constraints:
        model=models_from("shape"),
    conda:
        "../envs/data.yaml"
    params:
        shape=lambda wildcards: without(
            study.models[wildcards.model], "source", "revision", "tokenizer"
        ),
    script:
        "../workflow_scripts/make_model.py"


rule draw_adapter:
    """Draw where LoRA starts, once for both engines and for every form of the model's weights."""
    input:
        model="<results>/models/{model}",
        code=code_of("draw_adapter"),
    output:
        adapter="<results>/initial_adapters/{model}/r{rank}-seed{seed}.safetensors",
    log:
        "<logs>/draw_adapter/{model}/r{rank}-seed{seed}.log",
    wildcard_constraints:
        model=one_of(study.models),
        rank=r"\d+",
        seed=r"\d+",
    conda:
        "../envs/data.yaml"
    script:
        "../workflow_scripts/draw_adapter.py"


rule quantize_model:
    """Quantize a model's weights in mlx-lm's own format."""
    input:
        model="<results>/models/{model}",
        code=code_of("quantize_model"),
    output:
        quantized=directory("<results>/models/{model}-{bits}bit{group}"),
    log:
        "<logs>/quantize_model/{model}-{bits}bit{group}.log",
    wildcard_constraints:
        model=one_of(study.models),
        bits=r"\d",
        group=r"(-g\d+)?",
    conda:
        "../envs/mlx.yaml"
    params:
        group_size=lambda wildcards: int(wildcards.group.removeprefix("-g") or 64),
    script:
        "../workflow_scripts/quantize_model.py"
