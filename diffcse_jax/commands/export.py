"""Write a trained model as a folder of Hugging Face and sentence-transformers.

diffcse export --model runs/mine --output DIR
diffcse export --model runs/mine --push_to_hub USER/NAME
"""

import argparse

from diffcse_jax.errors import reported_to_user
from diffcse_jax.io import expand_path


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, metavar="RUN", help="the folder of a run, or one checkpoint in it")
    add("--output", help="the folder to write (default with --push_to_hub: RUN/export)")
    add("--truncate_dim", type=int, help="the size that readers cut embeddings to")
    add("--onnx", action="store_true", help="add onnx/model.onnx and its int8 form, checked against the model")
    results = "results.json files of `diffcse evaluate`, for the card (default: those in RUN)"
    add("--results", nargs="+", default=[], metavar="FILE", help=results)
    add("--license", help="the model's license, for the card, such as apache-2.0 (default: the base model's)")
    languages = "codes of the model's languages, for the card, such as en (default: the base model's)"
    add("--language", nargs="+", default=[], metavar="CODE", help=languages)
    upload = "upload the folder to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`"
    add("--push_to_hub", metavar="USER/NAME", help=upload)
    add("--private", action="store_true", help="with --push_to_hub: make a new repository private")
    options = parser.parse_args()
    if not options.output and not options.push_to_hub:
        parser.error("give --output DIR")
    if options.private and not options.push_to_hub:
        parser.error("--private needs --push_to_hub")
    with reported_to_user():
        from diffcse_jax.export.folder import About, export_and_upload  # starts JAX

        export_and_upload(
            expand_path(options.model),
            expand_path(options.output) if options.output else None,
            options.truncate_dim,
            with_onnx=options.onnx,
            about=About(
                options.push_to_hub, options.license, tuple(options.language), tuple(map(expand_path, options.results))
            ),
            private=options.private,
        )
