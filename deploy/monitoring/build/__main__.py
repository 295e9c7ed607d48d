"""`python -m deploy.monitoring.build`: writes every dashboard's JSON."""

from pathlib import Path

from deploy.monitoring.build.boards import BOARDS
from deploy.monitoring.build.grafana import written

FOLDER = Path(__file__).resolve().parents[1] / "dashboards"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(written(board))
