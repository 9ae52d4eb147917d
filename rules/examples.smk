# Needs: split conversations and a tokenizer. Makes: token rows with masks, the same for both engines.


rule tokenize_and_mask:
    """Turn conversations into token rows in which only the assistant's own words are supervised."""
    input:
        train=rules.split_sessions.output.train,
        val=rules.split_sessions.output.val,
        tokenizer=tokenizer_folder,
        code=code_of("tokenize_and_mask"),
    output:
        train="<examples>/train.jsonl",
        val="<examples>/val.jsonl",
        stats="<examples>/stats.json",
    log:
        "<logs>/tokenize_and_mask/{tokenizer}-{context}.log",
    conda:
        "../envs/data.yaml"
    params:
        masking=study.examples,
    script:
        "../workflow_scripts/tokenize_and_mask.py"


rule describe_examples:
    """Say in numbers and one picture what there is to learn from, before anything trains."""
    input:
        sessions=rules.read_sessions.output.stats,
        examples=examples_stats(),
        code=code_of("describe_examples"),
    output:
        description=report(
            "<results>/examples/description.md",
            caption="../report/examples.rst",
            category="Data",
            labels={"what": "sessions and examples"},
        ),
        table="<results>/examples/description.csv",
        lengths=report(
            "<results>/examples/lengths.svg",
            caption="../report/examples.rst",
            category="Data",
            labels={"what": "row lengths"},
        ),
    log:
        "<logs>/describe_examples/all.log",
    conda:
        "../envs/summary.yaml"
    script:
        "../workflow_scripts/describe_examples.py"
