"""CartridgePlugin: teaches vLLM's OpenAI server the request field `cartridges` and adds `/v1/cartridges`.

A `vllm.endpoint_plugins` entry point. It wraps the renderer that every endpoint's request passes through after
authentication. vLLM does not promise what it leans on there, so it is checked at start, and the server does not start
where it is missing: a `cartridges` field that nobody reads would be answered without them.
"""

from __future__ import annotations

import asyncio
import gc
from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from ..engine import host, host_api
from ..engine.contract import CONTROL
from ..engine.forms import configure, extra_of
from ..engine.refusals import SLEEP
from ..errors import UnsupportedEngine
from ..settings import from_environment
from .admin import add_routes
from .admission import Admission
from .drain import DrainGate
from .http import Gate, ResponseHeaders
from .metrics import StatusCollector, attach, follow
from .models import accept_models
from .wrap import CartridgeRenderer, GuardedEngine, ShowingRenderer


class CartridgePlugin:
    """The plugin; its `required_tasks` keep it off servers that generate nothing."""

    name = "cartridges"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Do nothing: the settings may stand in options of the server, which `attach_router` is the first to see."""
        self._failed: Exception | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Read the settings; add the routes and what stands before all others.

        vLLM would log an error here and go on without the plugin, so `init_state` raises it. From here on the garbage
        collector leaves out what this process has imported.
        """
        try:
            configure(getattr(getattr(app.state, "args", None), "kv_transfer_config", None))
            self._admission = Admission(from_environment())
        except Exception as error:
            self._failed = error
            return
        app.add_middleware(Gate, settings=self._admission.settings, router=self._admission.router)
        app.add_middleware(ResponseHeaders)
        app.add_middleware(DrainGate, drain=self._admission.drain)
        add_routes(app, self._admission)
        self.collector = StatusCollector(lambda: self._admission.library)
        attach(app, self.collector)
        gc.freeze()
        # vLLM does so at the end of its start. Until then each of its full collections goes through a million objects, most of
        # them modules: half a second, several times. Reference counts work as ever.

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Wrap what requests pass through. Raises `UnsupportedEngine`, which ends the server's start."""
        if self._failed is not None:
            raise self._failed
        host.start("api")
        admission = self._admission
        if engine_client is None:
            raise UnsupportedEngine("this server has no engine, and cartridges need one")
        models = host.attribute(state, "openai_serving_models")
        await admission.start(engine_client, host.attribute(models, "lora_requests"))
        host_api.wrap_handlers(
            state,
            engine_client,
            lambda renderer: CartridgeRenderer(renderer, admission),
            lambda engine: GuardedEngine(engine, admission.settings, admission.adapters),
            lambda renderer: ShowingRenderer(renderer, admission),
        )
        host_api.split_cached(engine_client)
        accept_models(admission.router, state)
        await host_api.check_handlers(state)
        host_api.before_shutdown(engine_client, admission.drain.wait)
        if CONTROL in extra_of(args.kv_transfer_config):
            host_api.refuse_sleep(engine_client, f"{SLEEP}; serve in-process, or without sleep mode")
        self._following = asyncio.create_task(follow(self.collector, admission.numbers))
