"""What kept a lap from more, told from what was read beside it: the card, the cores, or a request's way. Pure."""

from loadtest.bench.gpu.laps import Row
from loadtest.report.wording import percent, plain_number

FULL_SM, FULL_CORES, FULL_MEMORY = 0.9, 0.9, 0.8


def limit_in_words(row: Row, cores: int) -> str:
    """One sentence. cores: of the machine; 0 where that is not known."""
    middle = {name: spread.median for name, spread in row.figures.items()}
    busy, sm, clients = middle.get("machine_cores", 0.0), middle.get("sm_activity"), int(row.key["clients"])
    told = [f"{plain_number(busy)} of {cores} cores busy"] if cores else []
    if sm is not None:
        tensor, occupancy = (percent(middle.get(name, 0.0)) for name in ("tensor_activity", "sm_occupancy"))
        told.insert(0, f"SMs {percent(sm)} active, {occupancy} occupied, tensor cores {tensor}")
    if middle.get("memory_bandwidth_activity", 0.0) >= FULL_MEMORY:
        why = "the card's memory bandwidth is the limit"
    elif sm is not None and sm >= FULL_SM:
        why = "the card's SMs hold work nearly all the time, in kernels too small to fill them"
    elif cores and busy >= FULL_CORES * cores:
        why = "the CPU is the limit: copies, Triton and the models' Python, and the load generator, share its cores"
    elif "mps" not in str(row.key["mode"]) and clients > 1:
        why = "the processes take turns on the card, one context at a time, and none of them fills it"
    else:
        each = plain_number(middle.get("p50_ms", 0.0))
        why = f"neither card nor cores are full: an answer takes {each} ms, by way of Triton and the model's process"
    return f"{why} ({'; '.join(told)})." if told else f"{why}."
