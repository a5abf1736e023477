"""Puts the agent together from its settings: the one place that knows every part."""

from contextlib import ExitStack

from kvblend.v1 import agent_pb2, agent_pb2_grpc
from services.common.lifecycle import Boot
from services.common.server import GrpcServer
from services.common.tenants import TenantPolicy
from services.gpu_agent.copying.retrieve import Retriever
from services.gpu_agent.copying.storing import Storer
from services.gpu_agent.devices.choice import make_device
from services.gpu_agent.engines.descriptor_server import open_slots
from services.gpu_agent.engines.instances import Instances
from services.gpu_agent.lookup.lookups import Lookups
from services.gpu_agent.lookup.requests import Tickets
from services.gpu_agent.service import AgentService, Parts
from services.gpu_agent.settings import AgentSettings
from services.gpu_agent.store.client import StoreClient
from services.gpu_agent.store.sessions import StoreLink
from services.gpu_agent.totals import Totals


def build_server(settings: AgentSettings, stack: ExitStack) -> GrpcServer:
    """The agent, with everything but its server started; the stack stops it in reverse order."""

    def lost(why: str) -> None:
        server.fail(why)

    # Before the server, as nobody should connect while it takes its time.
    device = make_device(settings, stack, lost)
    server = GrpcServer(settings, [agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name])
    client = StoreClient(settings.store, settings.store_token, server.latencies)
    link = StoreLink(client, device, settings.name, settings.arena_dir, settings.heartbeat_seconds)
    stack.callback(link.close)
    lookups = Lookups(link, settings.threads, settings.max_requests)
    stack.callback(lookups.close)
    instances = Instances(device, open_slots(settings, stack), settings.max_mapped_bytes, lookups.end_all)
    stack.callback(instances.close)
    totals = Totals()
    service = AgentService(
        Parts(
            boot=Boot(settings.service),
            policy=TenantPolicy(settings.tenant_tokens),
            device=device,
            link=link,
            instances=instances,
            lookups=lookups,
            tickets=Tickets(),
            retriever=Retriever(device, link, lookups, totals),
            storer=Storer(device, link, totals),
            totals=totals,
            latencies=server.latencies,
            margin_seconds=settings.answer_margin_ms / 1000,
            engine_grace_seconds=settings.engine_grace_seconds,
        )
    )
    agent_pb2_grpc.add_AgentServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    link.start()
    return server
