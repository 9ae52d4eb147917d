"""Rule fetch_model: a model of the hub, or of a folder on disk -> a model folder of the study."""

from pathlib import Path

from workflow_scripts.lib import folders, joblog, model_files


def fetch_model(
    model_folder: str | Path,
    source: str,
    repo: str | None = None,
    revision: str | None = None,
    path: str | None = None,
) -> None:
    """Take a model's weights, config and tokenizer, and note in source.json where they are from.

    source: "hub" (with `repo`, and `revision`: a commit, tag or branch) or "path" (a folder).
    Raises ValueError in one line for what is missing, out of reach, or offered as pickles only.
    """
    if source == "hub":
        if not repo:
            raise ValueError(
                "repo: a model with `source: hub` needs one, such as Qwen/Qwen2.5-0.5B"
            )
        found, names, commit = model_files.fetch_from_hub(repo, revision or "main")
        origin = {"source": source, "repo": repo, "revision": commit}
    else:
        if not path:
            raise ValueError("path: a model with `source: path` needs one, a model folder")
        found, names = model_files.find_in_folder(path)
        origin = {"source": source, "path": path}
    with folders.atomic_folder(model_folder) as folder:
        model_files.take(found, names, folder, origin)
    joblog.say(f"{model_folder}: {len(names)} files of {repo or path}")


if __name__ == "__main__" and "snakemake" in globals():
    with joblog.to_file(snakemake.log[0]):
        fetch_model(model_folder=snakemake.output.model, **snakemake.params.source)
