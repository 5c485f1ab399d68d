"""The page: a template that needs no other file and no network."""

from __future__ import annotations

from typing import Any

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ facts.title }}</title>
<style>
body { margin: 0 auto; max-width: 1280px; padding: 1rem; color: #1c1c1c; background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
p.state { margin: 0; color: #555; }
.columns { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { font-weight: 600; }
img { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
.wide img { min-width: 60rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid #eee;
  overflow-wrap: anywhere; }
th { font-weight: 500; color: #555; width: 11rem; min-width: 7rem; overflow-wrap: normal; }
pre { overflow-x: auto; background: #f6f6f6; padding: .6rem; font-size: 13px; line-height: 1.4; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; }
ul.warnings { background: #fff4e0; padding: .6rem .6rem .6rem 1.8rem; }
summary { cursor: pointer; }
</style>
</head>
<body>
{% macro rows(pairs) %}<table>{% for name, value in pairs %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}
</table>{% endmacro %}
{% macro pictures(list) %}<div class="plots">{% for one in list %}
<figure><figcaption>{{ one.title }}</figcaption><img alt="{{ one.title }}" src="{{ one.source }}"></figure>
{%- endfor %}
</div>{% endmacro %}
<h1>{{ facts.title }}</h1>
<p class="state">{{ facts.state }}; report of {{ written }}</p>
{% set warnings = facts.notes + facts.warnings %}
{% if warnings %}
<h2>Warnings</h2>
<ul class="warnings">{% for text in warnings %}<li>{{ text }}</li>{% endfor %}</ul>
{% endif %}
<div class="columns">
<section><h2>Model</h2>{{ rows(facts.model_rows()) }}</section>
<section><h2>Result</h2>{{ rows(facts.loss_rows()) }}</section>
</div>
<h2>Run</h2>
{{ rows(facts.run_rows()) }}
<h2>Training</h2>
{% if training %}{{ pictures(training) }}{% else %}<p>No step was logged yet.</p>{% endif %}
<h2>Monitors</h2>
{% if monitors %}{{ pictures(monitors) }}{% else %}
<p>No monitored series: they were off, or the model has no experts.</p>{% endif %}
{% if precision %}
<h2>Precision</h2>
<pre>{{ precision }}</pre>
<div class="wide"><img alt="Precision by layer and linear" src="{{ quantization.source }}"></div>
{% endif %}
{% if sample %}
<h2>Generated sample</h2>
<pre class="text"><b>{{ prompt }}</b>{{ sample }}</pre>
{% endif %}
<h2>Checkpoints</h2>
{% set checkpoints = facts.checkpoint_rows() | list %}
{% if checkpoints %}<table>{% for name, state, size in checkpoints %}
<tr><th>{{ name }}</th><td>{{ state }}</td><td>{{ size }}</td></tr>{% endfor %}
</table>{% else %}<p>None was saved yet.</p>{% endif %}
<h2>Options</h2>
{% for part, pairs in facts.options().items() %}
<details><summary>{{ part }}: {{ pairs | length }}</summary>{{ rows(pairs) }}</details>
{% endfor %}
</body>
</html>
"""


def render(**values: Any) -> str:
    """Fill the template in; `values` are the names in it, `facts` among them.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE).render(**values)
