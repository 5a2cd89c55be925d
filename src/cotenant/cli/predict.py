"""`cotenant predict`: predict speeds on MIG slices from latencies measured under MPS."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="Predict speeds on MIG slices from latencies measured under MPS.")


@app.command()
def predict(
    input: Annotated[
        str,
        typer.Option(
            "--input",
            help="F.npz with X, latencies of n mixes under MPS: (n, levels 100/50/14 %, 7 co-runners). Optionally Y, "
            "latencies on the slices 7g/4g/3g, by which the error is computed.",
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", help="Model file (default: the built-in one).")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            help="Write the predictions: latencies P (n, slices 7g/4g/3g, 7 co-runners) and speeds S (n, 7 co-runners, "
            "slices 7g/4g/3g/2g/1g).",
        ),
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also print the model's errors and the origin of its data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Predict the latencies of jobs on the MIG slices 7g, 4g and 3g from their latencies as co-runners under MPS. All
    latencies are fractions of the largest latency of the same job.

    Each mix in the file has seven co-runners; dummies take the places of missing jobs. If the file also has latencies
    measured on the slices (Y), the predictions' error is printed, without that of dummies.
    """
    from cotenant.core.mig import geometry
    from cotenant.profiles.mig.mps_mig import MpsMigModel, read_measurements, write_predictions

    trained = MpsMigModel.load(model)
    mps, mig = read_measurements(input)
    content = trained.evaluate(mps, mig)
    if out:
        slices = geometry("A100-40GB", double_memory=False)
        write_predictions(out, trained.predict(mps), trained.predict_speeds(mps, slices))
        content["out"] = out
    if card:
        content["card"] = trained.card
    if as_json:
        print(json.dumps(content))
        return
    if content["mae"] is None:
        print(f"{content['n_columns']} co-runners predicted; without latencies Y in the file, their error is unknown")
    else:
        print(f"mean absolute error {content['mae']:.4f} over {content['n_columns']} co-runners, dummies left out")
        for name, value in content["mae_by_slice"].items():
            print(f"  {name}: {value:.4f}")
    if out:
        print(f"written: {out}")
    else:
        print("the predictions are not printed: --out F.npz writes them")
    if card:
        print(json.dumps(trained.card, indent=1))
