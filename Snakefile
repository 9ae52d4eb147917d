from snakemake.utils import min_version

min_version("9.19")

# A study given by --configfile stands alone: it inherits nothing from the default one.
if not workflow.overwrite_configfiles:

    configfile: f"{workflow.basedir}/config.yaml"


include: "rules/common.smk"
include: "rules/sessions.smk"
include: "rules/models.smk"
include: "rules/examples.smk"
include: "rules/train.smk"
include: "rules/summary.smk"


rule all:
    """Everything of the study: all runs, the comparison, the plots."""
    default_target: True
    input:
        "<results>/summary.md",
        "<results>/study.sqlite",
        "<results>/examples/description.md",
        rules.plot_runs.output,


onstart:
    leave_runs()


onsuccess:
    show_summary()
    show_retry()


onerror:
    show_retry()
