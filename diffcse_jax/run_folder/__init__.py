"""The folder of a run.

    config.json            the configuration
    encoder/               configuration, tokenizer and pooler of the starting checkpoint, and
                           base_model.json
    start.json             digests of the starting weights and of the files above
    lock                   the process that trains here, or trained here last
    checkpoints/STEP       parameters, optimizer state, position in the data and dev scores (Orbax)
    metrics.jsonl          one row for each logged step and each dev evaluation
    starts.jsonl           versions, devices, configuration and digests, one line for each start
                           since the run began at step 0
    start_scores.json      dev scores of the starting checkpoint: the baseline
    selection.json         the exported model and its verdict, written when training is over
    selected.safetensors   the weights of that model, if they are not those of a checkpoint
    export/                the exported model
    damaged/               damaged files, moved out of the way

`finding.py` finds a run and its export, and imports nothing that only training needs. `start.py`
has the first four entries, `checkpoints.py` the fifth and the encoder of a run or checkpoint, and
`records.py` the others. `state.py` is what a checkpoint keeps of a step, and `summary.py` describes
and draws the folder. A missing or damaged file raises a `CheckpointError` that names it.
"""
