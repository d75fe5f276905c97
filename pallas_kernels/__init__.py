"""Device code of a paged KV cache: attention over pages, and their updates.

It knows arrays and page indices; no request, prefix or policy.

    paged_attention.paged_attention   attention of ragged queries over pages
    merge_states.merge_states         attention over disjoint sets of keys
    kv_update.write_kv, copy_rows     rows written and copied in place
    page_shape.page_shape             how rows lie in a page's array
    checks.check_tables, check_slots  the values that kernels trust, checked
"""
