"""Writes deploy/grafana/gradcomm.json, the Grafana dashboard of a cluster of daemons.

What is shown is the list below; how a panel is spelled is Grafana's own library's business. Names of series come from
`gcserver.admin.catalogue`, so that one that is gone cannot be asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableRefresh

from gcserver.admin import catalogue as c
from tools import generated

TARGET: Final = generated.ROOT / "deploy" / "grafana" / "gradcomm.json"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
#: of the daemons that were chosen at the top of the dashboard
NODES: Final = 'instance=~"$instance"'
#: and of the training runs that were
JOBS: Final = f'{NODES}, {c.JOB}=~"$training_job"'
RATE: Final = "$__rate_interval"
#: a legend: the training run of a line
RUN: Final = f"{{{{{c.JOB}}}}}"
#: of 24 columns; heights of panels
WIDTH: Final = 8
NUMBER, GRAPH = 4, 8


@dataclass(frozen=True, slots=True)
class Shown:
    """One panel. ``queries``: (PromQL, what a line is called); ``single``: its newest value as a number."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    single: bool = False


def _share(labels: str, numerator: str, denominator: str) -> str:
    return f"sum by ({labels}) (rate({numerator}[{RATE}])) / (sum by ({labels}) (rate({denominator}[{RATE}])) > 0)"


ROWS: Final[tuple[tuple[str, tuple[Shown, ...]], ...]] = (
    (
        "Overview",
        (
            Shown("Daemons", "That can be scraped.", "short", ((f"count({c.INFO.name}{{{NODES}}})", ""),), True),
            Shown("Links down", "As each end sees them.", "short",
                  ((f"count({c.PEER_UP.name}{{{NODES}}} == 0) or vector(0)", ""),), True),
            Shown("Longest wait", "Whatever is waited for, by anybody.", "s",
                  ((f"max({c.WAITING.name}{{{JOBS}}}) or vector(0)", ""),), True),
        ),
    ),
    (
        "Training",
        (
            Shown("Steps a second", "Settled steps of models, by one node's count.", "short",
                  ((f'max by ({c.JOB}) (rate({c.STEPS.name}{{{JOBS}, outcome="settled"}}[{RATE}]))',
                    RUN),)),
            Shown("Step, push to settled", "Median and 99th percentile over the nodes.", "s", tuple(
                (f"histogram_quantile({q}, "
                 f"sum by ({c.JOB}, le) (rate({c.STEP_SECONDS.name}_bucket{{{JOBS}}}[{RATE}])))",
                 f"{RUN} p{round(100 * q)}") for q in (0.5, 0.99))),
            Shown("Void steps", "Share of steps whose gradients were not finite.", "percentunit",
                  ((_share(c.JOB, f'{c.STEPS.name}{{{JOBS}, outcome="void"}}', f"{c.STEPS.name}{{{JOBS}}}"),
                    RUN),)),
            Shown("Waits", "Who is waited for, and for what.", "s",
                  ((f"max by ({c.JOB}, peer, wanted) ({c.WAITING.name}{{{JOBS}}})",
                    f"{RUN}: {{{{wanted}}}} of {{{{peer}}}}"),)),
            Shown("Error of audited steps", "Relative L2 distance from the exact average.", "percentunit",
                  ((f"max by ({c.JOB}) ({c.AUDIT_ERROR.name}{{{JOBS}}})", RUN),)),
            Shown("Held back", "L2 norm of a node's residuals.", "short",
                  ((f"{c.RESIDUAL_NORM.name}{{{JOBS}}}", f"{RUN} on {{{{instance}}}}"),)),
            Shown("Plan in force", "Number of the newest plan; 0: the defaults.", "none",
                  ((f"max by ({c.JOB}) ({c.PLAN_VERSION.name}{{{JOBS}}})", RUN),)),
            Shown("Rounds a second", "Partitions finished, by node.", "short",
                  ((f"sum by (instance) (rate({c.ROUNDS.name}{{{JOBS}}}[{RATE}]))", "{{instance}}"),)),
            Shown("Audits", "Steps that were audited.", "short",
                  ((f"sum by ({c.JOB}) (rate({c.AUDITS.name}{{{JOBS}}}[{RATE}]))", RUN),)),
        ),
    ),
    (
        "Network",
        (
            Shown("Sent", "Bytes a second on the wire.", "Bps",
                  ((f'sum by (instance, peer) (rate({c.BYTES.name}{{{NODES}, direction="out", kind="wire"}}[{RATE}]))',
                    "{{instance}} to {{peer}}"),)),
            Shown("Received", "Bytes a second on the wire.", "Bps",
                  ((f'sum by (instance, peer) (rate({c.BYTES.name}{{{NODES}, direction="in", kind="wire"}}[{RATE}]))',
                    "{{instance}} from {{peer}}"),)),
            Shown("Compression", "Bytes of uncompressed gradients for each byte sent.", "none",
                  ((_share("instance, peer", f'{c.BYTES.name}{{{NODES}, direction="out", kind="raw"}}',
                           f'{c.BYTES.name}{{{NODES}, direction="out", kind="wire"}}'), "{{instance}} to {{peer}}"),)),
            Shown("Frames", "Frames a second, both ways.", "short",
                  ((f"sum by (instance) (rate({c.FRAMES.name}{{{NODES}}}[{RATE}]))", "{{instance}}"),)),
            Shown("Round trips", "Of heartbeats.", "s",
                  ((f"{c.PEER_RTT.name}{{{NODES}}}", "{{instance}} to {{peer}}"),)),
            Shown("Links", "1: up. Lanes that are not are there by themselves.", "none",
                  ((f"{c.PEER_UP.name}{{{NODES}}}", "{{instance}} to {{peer}}"),
                   (f"{c.PEER_LANE_UP.name}{{{NODES}}} == 0", "{{instance}} to {{peer}}, lane {{lane}}"))),
        ),
    ),
    (
        "Daemons",
        (
            Shown("What should not happen", "Events a minute, by kind.", "short",
                  ((f"sum by (kind) (60 * rate({c.ERRORS.name}{{{NODES}}}[{RATE}])) > 0", "{{kind}}"),)),
            Shown("Lanes", "1: serves.", "none",
                  ((f"{c.LANE_READY.name}{{{NODES}}}", "{{instance}} lane {{lane}}"),)),
            Shown("Lane restarts", "Within an hour.", "short",
                  ((f"increase({c.LANE_RESTARTS.name}{{{NODES}}}[1h])", "{{instance}}"),)),
            Shown("Planning", "Share of a core that the planning process uses, by what for.", "percentunit",
                  ((f"sum by (instance, part) (rate({c.PLANNING.name}{{{NODES}}}[{RATE}]))",
                    "{{instance}} {{part}}"),)),
            Shown("Shared memory", "Held for gradients and averages.", "bytes",
                  ((f"sum by (instance, {c.JOB}) ({c.ARENA.name}{{{JOBS}}})", f"{RUN} on {{{{instance}}}}"),)),
            Shown("Certificates end in", "Of nodes and their CA.", "s",
                  ((f"{c.EXPIRES.name}{{{NODES}}} - time()", "{{instance}} {{certificate}}"),)),
        ),
    ),
)  # fmt: skip


def queries() -> Iterator[str]:
    """All that the panels ask Prometheus."""
    for _, panels in ROWS:
        for panel in panels:
            for expr, _ in panel.queries:
                yield expr


def build() -> str:
    """The dashboard as JSON, for Grafana's import or its provisioning."""
    made = (
        dashboard.Dashboard("gradcomm")
        .uid("gradcomm")
        .tags(["gradcomm"])
        .description("Daemons, links and training runs of gradcomm. Generated by tools/gen_grafana.py.")
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("instance", "Daemon", f"label_values({c.INFO.name}, instance)"))
        .with_variable(_variable(c.JOB, "Training run", f"label_values({c.STEPS.name}, {c.JOB})"))
    )
    y = 0
    for name, panels in ROWS:
        made = made.with_row(dashboard.Row(name).grid_pos(GridPos(h=1, w=24, x=0, y=y)))
        y += 1
        height = NUMBER if panels[0].single else GRAPH
        for i, shown in enumerate(panels):
            at = GridPos(h=height, w=WIDTH, x=i % 3 * WIDTH, y=y + i // 3 * height)
            made = made.with_panel(_panel(shown).grid_pos(at))
        y += -(-len(panels) // 3) * height
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _variable(name: str, label: str, query: str) -> Any:
    chosen = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    return chosen.multi(True).include_all(True).all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _panel(shown: Shown) -> Any:
    newest = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel: Any = timeseries.Panel().min(0).fill_opacity(10)
    if shown.single:
        panel = stat.Panel().reduce_options(newest)
    panel = panel.title(shown.title).description(shown.about).unit(shown.unit).datasource(SOURCE)
    if not shown.single:
        panel = panel.tooltip(common.VizTooltipOptions().mode("multi"))
    for i, (expr, legend) in enumerate(shown.queries):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + i))
        panel = panel.with_target(query.instant() if shown.single else query)
    return panel


def main(argv: list[str] | None = None) -> int:
    return generated.keep({TARGET: build()}, "metrics", argv)


if __name__ == "__main__":
    sys.exit(main())
