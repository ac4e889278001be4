"""What any failure is to whoever asked."""

from __future__ import annotations

import structlog
from fastapi.responses import JSONResponse

from pipeline.gateway.http.errors import ApiError, storage_full, unavailable
from pipeline.ledger.ledger import JobNotFound, ResultsRemoved
from pipeline.ports import StoreError, StoreFull
from pipeline.runtime.availability import ServiceUnavailable

logger = structlog.get_logger(__name__)


def api_error(error: Exception) -> ApiError:
    """What a failure of the pipeline is to a caller. Where things lie is not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ResultsRemoved):
        return ApiError(410, "results_removed", "the results were removed, as they are kept for so long; submit anew")
    if isinstance(error, JobNotFound):
        return ApiError(404, "batch_not_found", "there is no such batch")
    if isinstance(error, StoreFull):
        logger.error("storage_full", reason=str(error))
        return storage_full()
    if isinstance(error, StoreError | ServiceUnavailable):
        logger.error("unavailable", reason=str(error))
        return unavailable("storage or a server behind it can't be reached now; try again")
    logger.error("pipeline_error", reason=str(error))
    return ApiError(500, "internal_error", "something that is stored can't be read; tell the operator")


def answer_to(error: ApiError) -> JSONResponse:
    """The error as an answer."""
    return JSONResponse(error.body(), error.status, headers=error.headers)
