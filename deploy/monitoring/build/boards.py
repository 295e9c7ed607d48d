"""Every dashboard, by the name of its file."""

from deploy.monitoring.build.batching import BATCHING
from deploy.monitoring.build.gateway import GATEWAY
from deploy.monitoring.build.gpu import GPU
from deploy.monitoring.build.video import VIDEO

BOARDS = {"gateway": GATEWAY, "batching": BATCHING, "video": VIDEO, "gpu": GPU}
