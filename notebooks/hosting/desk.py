"""The process that a room starts for each learner, as the learner's Unix user. It updates the
learner's copies of the course, and then becomes the hub's single-user JupyterLab.

The lab has the settings QUIET_APP and QUIET_SETTINGS of `hosting.lab`. Kernels use Unix sockets in
a folder of the learner, not ports, for two reasons. When thirty kernels start at once, another
process can take a kernel's port before the kernel's Python has started. And every user of the
machine can connect to ports of 127.0.0.1.
"""

import json
import os
from pathlib import Path

from hosting import copies
from hosting.lab import QUIET_APP, QUIET_SETTINGS
from lpkit.files import own_folder, write_atomically


def main() -> None:
    home = Path.home()
    root = copies.work_folder(home / "course")
    for change in copies.update(root):
        print(change["notebook"], change["done"], *change["notes"], sep="; ", flush=True)
    mine, idle = own_folder(home / ".room"), int(os.environ["LPKIT_IDLE_SECONDS"])
    (mine / "labconfig").mkdir(exist_ok=True)
    write_atomically(mine / "jupyter_server_config.json", json.dumps({
        "LabApp": {key: value for key, value in QUIET_APP.items() if key != "default_url"},
        "ServerApp": {"root_dir": str(root), "shutdown_no_activity_timeout": idle},
        "MappingKernelManager": {"cull_idle_timeout": idle},
        "TerminalManager": {"cull_inactive_timeout": idle}, "KernelManager": {"transport": "ipc"}}))
    write_atomically(mine / "labconfig" / "default_setting_overrides.json",
                     json.dumps(QUIET_SETTINGS))
    os.environ["JUPYTER_CONFIG_PATH"] = str(mine)
    os.chdir(root)
    from jupyterhub.singleuser.extension import JupyterHubSingleUser

    from hosting.server import OnSocket

    OnSocket.inherit(int(os.environ.pop("LPKIT_LISTENER")))
    JupyterHubSingleUser.serverapp_class = OnSocket
    JupyterHubSingleUser.launch_instance()

