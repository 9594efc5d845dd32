"""Describe the API of a run as an OpenAPI document."""

from __future__ import annotations

from typing import Any

import dubito
from dubito.data.columns import CategoryColumn, Column, DateColumn
from dubito.data.dates import as_text
from dubito.data.text_column import TextColumn
from dubito.uses.runs.prediction import ANSWER, ASK
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.service import Service

_MEANING = {
    "prediction": "the most probable class, or the mean",
    "stddev": "the standard deviation",
    "lower": "the lower end of the interval",
    "upper": "the upper end of the interval",
    "confidence": "the largest probability",
    "epistemic": "the uncertainty that more data removes: a variance, or for classes nats",
    "aleatoric": "the uncertainty that more data cannot remove: a variance, or for classes nats",
    "unfamiliar": "the share of held-out rows that were more familiar than this one",
    "decision": "whether to answer, or to ask somebody",
}


def describe(service: Service, limits: ServingLimits) -> dict[str, Any]:
    """Return the OpenAPI document of the API."""
    run = service.run
    coverage = run.coverage if service.coverage is None else service.coverage
    about = f"Predicts {run.target!r} ({run.task}) with its uncertainty."
    if run.task == "regression":
        about += f" Intervals hold the truth in {coverage:.0%} of cases."
    predict = {
        "summary": "Predict rows.",
        "operationId": "predict",
        "requestBody": {"required": True, "content": _json(_reference("Rows"))},
        "responses": {
            "200": _response("One prediction per row, in order.", _reference("Predictions")),
            **{str(status): _failure(told) for status, told in _REFUSALS.items()},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Dubito: {run.target}", "version": dubito.__version__, "description": about},
        "paths": {
            "/predict": {"post": predict},
            "/health": {"get": _get("health", "Whether the server works.", _json({"type": "object"}))},
            "/metrics": {
                "get": _get("metrics", "Counts for Prometheus.", {"text/plain": {"schema": {"type": "string"}}})
            },
            "/openapi.json": {"get": _get("openapi", "This document.", _json({"type": "object"}))},
        },
        "components": {"schemas": _schemas(service, limits)},
    }


_REFUSALS = {
    401: "The token is missing or wrong, if the server has one.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    422: "The rows cannot be predicted; the error says why.",
    503: "Too many rows are waiting.",
}


def _schemas(service: Service, limits: ServingLimits) -> dict[str, Any]:
    names, columns = service.run.columns, service.run.encoder.columns
    array = {"type": "array", "items": {"type": ["number", "string", "boolean", "null"]}}
    row: dict[str, Any] = {
        "type": "object",
        "properties": {column.name: _cell(column) for column in columns},
        "required": [column.name for column in columns],
        "additionalProperties": True,
        "description": "One row; null stands for a value that is not known, and other columns are ignored.",
    }
    rows = {
        "type": "object",
        "properties": {
            "rows": {
                "type": "array",
                "items": {"anyOf": [_reference("Row"), array]},
                "minItems": 1,
                "maxItems": limits.rows,
            },
            "columns": {
                "type": "array",
                "items": {"type": "string"},
                "description": f"The order of the cells of arrays; by default {', '.join(row['required'])}.",
            },
        },
        "required": ["rows"],
        "additionalProperties": False,
    }
    predictions = {
        "type": "object",
        "properties": {
            "predictions": {"type": "array", "items": _reference("Prediction")},
            "notes": {"type": "array", "items": {"type": "string"}, "description": "What was odd about the rows."},
        },
        "required": ["predictions", "notes"],
    }
    prediction = {
        "type": "object",
        "properties": {name: _output(name, service) for name in names},
        "required": [*names],
    }
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    return {"Row": row, "Rows": rows, "Prediction": prediction, "Predictions": predictions, "Error": error}


def _cell(column: Column) -> dict[str, Any]:
    if isinstance(column, CategoryColumn):
        known = {"type": ["string", "number", "boolean", "null"], "examples": list(column.levels)[:10]}
        return {**known, "description": f"a category; training rows had {len(column.levels) + len(column.rare)}"}
    if isinstance(column, TextColumn):
        return {"type": ["string", "null"], "description": "a text"}
    low, high = column.low, column.high
    if isinstance(column, DateColumn):
        ends = "" if low is None or high is None else f"; training rows: {as_text(low)} to {as_text(high)}"
        form = "ISO 8601" if column.holds == "dates" else column.format
        return {"type": ["string", "null"], "description": f"a date, {form}{ends}"}
    if column.boolean:
        return {"type": ["boolean", "number", "string", "null"], "description": "true or false"}
    ends = "" if low is None or high is None else f"; training rows: {low:g} to {high:g}"
    return {"type": ["number", "string", "null"], "description": f"a number{ends}"}


def _output(name: str, service: Service) -> dict[str, Any]:
    classes = service.run.encoder.class_names
    told = _MEANING.get(name, f"the probability of {name.removeprefix('p_')}")
    if name == "decision":
        return {"enum": [ANSWER, ASK], "description": told}
    if name == "prediction" and classes:
        return {"enum": list(classes), "description": told}
    return {"type": ["number", "null"], "description": told}


def _get(name: str, told: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"operationId": name, "summary": told, "responses": {"200": {"description": told, "content": content}}}


def _response(told: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": told, "content": _json(schema)}


def _failure(told: str) -> dict[str, Any]:
    return _response(told, _reference("Error"))


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
