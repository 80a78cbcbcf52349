"""What runs inside a vLLM engine: ``pip install kvroute`` there, and ``VLLM_PLUGINS=kvroute`` switches it on.

vLLM loads `register` in each of its processes (group ``vllm.general_plugins``) and `endpoint.Plugin` in its API server
(group ``vllm.endpoint_plugins``). Importing this package imports neither vLLM nor the gateway.
"""

from __future__ import annotations

import logging
import os
import uuid

log = logging.getLogger("vllm.kvroute")

INSTANCE = "_KVROUTE_ENGINE_INSTANCE"
"""Environment variable by which the processes of one engine share its random id: children inherit it."""


def register() -> None:
    """Install the scheduler's part in this process; repeated calls change nothing.

    Does nothing unless ``VLLM_PLUGINS`` names ``kvroute``: vLLM loads every installed general plugin when the variable
    is unset, and an engine that merely shares an environment with the gateway must stay as it is.
    """
    if "kvroute" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    os.environ.setdefault(INSTANCE, uuid.uuid4().hex)
    import vllm  # noqa: PLC0415 - only inside an engine

    from kvroute.vllm_plugin import scheduler  # noqa: PLC0415 - not needed where the plugin is off
    from kvroute.vllm_plugin.wraps import STATUS, CannotWrapError, replace_method, wraps_for  # noqa: PLC0415

    try:
        wraps = wraps_for(vllm.__version__)
    except CannotWrapError as error:
        for feature in ("export_digests", "hold", "verify_digests"):
            STATUS.turn_off(feature, str(error))
        return

    def install_finished() -> None:
        replace_method(wraps.request_finished, scheduler.wrap_request_finished)

    def install_match() -> None:
        replace_method(wraps.match_tokens, scheduler.wrap_get_num_new_matched_tokens)

    STATUS.turn_on("export_digests", install_finished)
    STATUS.turn_on("hold", install_finished)
    STATUS.turn_on("verify_digests", install_match)
    if scheduler.verification_skipped():
        STATUS.turn_off("verify_digests", f"{scheduler.SKIP_VERIFICATION}=1: handles are believed, text may be WRONG")
