# SPDX-License-Identifier: BSD-3-Clause
"""Faults planted by hand, where a slip is likely and easy to miss; see ``kill_matrix.py``.

Each replaces a text that stands exactly once in its file. Files are below ``src/preamp``, what has
to notice is below ``tests``.
"""

KERNELS = "kernels optim multi_tensor"
TRITON = "kernels/test_back_end_rules.py kernels/test_back_ends.py "
TRITON += "kernels/test_ops.py kernels/triton"
OPTIM = "optim engine/test_fast_path.py"
ENGINE = "engine checkpoint optim/test_fused_with_amp.py optim/test_larc.py compat"
MASTERS = "engine optim fp16_utils checkpoint/test_resume.py"
SCALING = "scaling engine/test_step_semantics.py engine/test_matrix.py"
STORED = "kernels/test_stored.py optim/test_stored_moments.py checkpoint/test_storage.py "
STORED += "engine/test_storage.py engine/test_storage_in_trouble.py engine/test_programs.py"
CASTING = "casting engine/test_initialize.py engine/test_matrix.py"

FAULTS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    # (file, folders of tests): what stands there, and what a slip would make of it
    ("kernels/rules.py", KERNELS): (
        ("v = beta2 * v + rest * g * g", "v = beta2 * v + g * g"),
        ('"COUPLED": decays and not decoupled', '"COUPLED": decays'),
        ("    if EPS_INSIDE:\n        v = v + eps\n", ""),
        ("    if DECOUPLED:\n        u = u + decay * p\n    return u\n", "    return u\n"),
        ("choose(spread < eps, eps, spread)", "spread"),
        ("        n = choose(n < -bound, -bound, n)\n", ""),
        ("step = step + size * (decay * p)", "step = step + decay * p"),
        ("        step = momentum * m - change\n", "        pass\n"),
        ("m = choose(is_first, g, later)", "m = later"),
        ("share=1 - self.dampening", "share=1.0"),
        ("divide(g, root(m) + eps)", "divide(g, root(m + eps))"),
        ("    u = corrected(m, c1)\n", "    u = m\n"),
    ),
    ("kernels/reference/formulas.py", KERNELS): (
        ("size = size * c2**0.5 / c1", "size = size * c2 / c1"),
        ("ratio = p_norm / u_norm\n", "ratio = p_norm / (u_norm + 1e-3)\n"),
        ("g_norm + rule.weight_decay * p_norm + rule.eps", "g_norm + rule.weight_decay * p_norm"),
        ("torch.where(v < 0, n, blend)", "torch.where(v <= 0, n, blend)"),
        ("number / c2**0.5 + rule.eps", "number / c2 + rule.eps"),
    ),
    ("kernels/vectors.py", KERNELS): (
        ("if not has_long_sums(tensor.device, tensor.numel()):", "if True:"),
    ),
    ("kernels/blocks/ops.py", KERNELS): (
        ("if update.found_inf.item() != 0:", "if False:"),
        ("step = _constant(number(update.step) if corrects else math.inf)", "step = _constant(1)"),
        ("        wide.mul_(inv_scale)\n", "        pass\n"),
        ("                copy_where_wanted(beside, params)\n", ""),
        ("total if factor is None else total * factor.to(_CPU)", "total"),
        (
            "(~torch.isfinite(_stack(ends)).all()).float()",
            "torch.isnan(_stack(ends)).any().float()",
        ),
    ),
    ("kernels/blocks/cut.py", KERNELS): (
        ("if total + size > most or len(together) == _TOGETHER:", "if len(together) == _TOGETHER:"),
    ),
    ("kernels/places.py", KERNELS): (
        ("if not all([are_contiguous(column, codes) for column in columns]):", "if False:"),
        ("len(devices) > 1 or any([tensor.is_neg() for tensor in tensors])", "len(devices) > 1"),
    ),
    ("kernels/jit/loops.py", KERNELS): (
        ("np.minimum(numels[owners] - starts, CHUNK)", "np.minimum(numels[owners], CHUNK)"),
        ("stepped(p, g, m, v, number, rule)", "stepped(p, g, m, v, each[0], rule)"),
        ("                    poke(vs, i, v)\n", "                    pass\n"),
        ("    finally:\n        _wait_for(others)", "    finally:\n        pass"),
        ("            total += squares\n        sums", "            total = squares\n        sums"),
    ),
    ("kernels/jit/words.py", KERNELS): (
        ("builder.add(builder.add(word, _I32(0x7FFF)), odd)", "builder.add(word, _I32(0x7FFF))"),
        ("if size >= np.uint32(0x477FF000):", "if size >= np.uint32(0x7F800000):"),
        ("if size < np.uint32(0x400):", "if size < np.uint32(0):"),
    ),
    ("kernels/jit/formulas.py", KERNELS): (
        ("return p - number * u, m, v", "return p - number * m, m, v"),
        ("return a if condition else b", "return b"),
        ("work.numbers_of(rule) * c2**0.5 + rule.eps", "work.numbers_of(rule) * c2 + rule.eps"),
        ("globals().update({record.__name__: record for record in _RECORDS.values()})", ""),
    ),
    ("kernels/jit/ops.py", KERNELS): (
        ("enumerate(self.part.rows) if place != 1]", "enumerate(self.part.rows) if place > 1]"),
        ("largest[is_beyond] = _MOST", "pass"),
    ),
    ("kernels/jit/words.py", "numerics"): (
        ("found = builder.select(is_tiny, builder.add", "builder.select(is_tiny, builder.add"),
        ("found = builder.select(is_finite, found, _I32(NONFINITE))", "pass"),
    ),
    ("kernels/jit/loops.py", "numerics kernels/test_jit.py"): (
        ("poke(tables, i, np.uint32(0))", "pass"),
        ("bits = finite_or_zero(bits, X)", "pass"),
        ("* 4 + (i & 3)", "* 4 + (i & 7)"),
    ),
    ("kernels/jit/ops.py", "numerics kernels/test_jit.py"): (
        ("each[owners] = np.add.reduceat(", "each[: len(owners)] = np.add.reduceat("),
        ("finite = each.sum(1) - each[:, NONFINITE]", "finite = each.sum(1)"),
        ("if y is not None and (x is torch.float64) != (y is torch.float64):", "if False:"),
    ),
    ("kernels/reference/update.py", KERNELS): (
        (
            "return -torch.expm1(self.scalar(step) * log)",
            "return 1 - torch.exp(self.scalar(step) * log)",
        ),
        ("self._store_one(self._half, self._targets[0])", "self._store_one(self._half, p)"),
        (
            "rounded = torch.where(skip, target, rounded)",
            "rounded = rounded * ~skip + target * skip",
        ),
        ("return (a > 0) & (b > 0)", "return a > 0"),
    ),
    ("kernels/reference/ops.py", KERNELS): (
        ("wide = torch.float64 if has_float64 else torch.float32", "wide = torch.float32"),
        ("torch.isfinite(max_abs).all()", "~torch.isinf(max_abs).any()"),
        (
            "grad.copy_(wide if addend is None else wide + addend.to(dtype))",
            "grad.copy_(wide).add_(0 if addend is None else addend)",
        ),
    ),
    ("kernels/triton/updates.py", TRITON): (
        ("size = divide(size * root(c2), c1)", "size = divide(size, c1)"),
        ("coefficient * divide(p_norm, other + decay * p_norm + eps)", "divide(p_norm, other)"),
        ("    if CORRECTS:\n", "    if CORRECTED:\n"),
        ("blend = tl.where(v < 0, norm, blend)", "blend = tl.where(v <= 0, norm, blend)"),
    ),
    ("kernels/triton/device/walk.py", TRITON): (
        ("rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16", "rounded = (bits + 0x8000) >> 16"),
        ("tl.where(is_nan, 0x7FC0, rounded)", "rounded"),
        (
            "tl.where(tl.load(found_inf_at) != 0, 0, count)",
            "tl.where(tl.load(found_inf_at) == 1, 0, count)",
        ),
    ),
    ("kernels/triton/device/stored.py", TRITON): (
        ("narrow(widen(raw, P, p.dtype), H)", "narrow(p, H)"),
    ),
    ("kernels/stored.py", KERNELS): (
        ("high = ((word + 0x8000) >> 16).to(torch.int16)", "high = (word >> 16).to(torch.int16)"),
        ("(far == 0x8000).to(torch.int16)", "(far == -0x8000).to(torch.int16)"),
        ("(ODD**row & 0xFFFF)", "1"),
        ("code = torch.where((code == 0) & (size > 0), torch.ones_like(code), code)", "pass"),
    ),
    ("kernels/triton/device/reductions.py", TRITON): (
        (
            "tl.where(bits < infinity_bits(MATH), bits, 0)",
            "tl.where(bits <= infinity_bits(MATH), bits, 0)",
        ),
    ),
    ("optim/fused/norms.py", OPTIM): (
        ("if max_norm == 0 or not any(every):", "if not any(every):"),
        ("    norm = norm * scale\n", ""),
        (
            "torch.where(norm > max_norm, max_norm / norm, one) * scale",
            "torch.where(norm > max_norm, max_norm / norm, one)",
        ),
    ),
    ("optim/fused/base.py", OPTIM): (
        ("step += 1 if found_inf is None else", "step += 1 if True else"),
        ("torch.where(is_lost, torch.ones_like(factor), factor)", "factor"),
    ),
    ("optim/fused/novograd.py", OPTIM): (
        ('start = 0.0 if group["init_zero"] else NO_NORM_YET', "start = NO_NORM_YET"),
        ("self.moment_mode == 0", "self.moment_mode != 0"),
    ),
    ("optim/larc.py", "optim engine/test_step_semantics.py"): (
        ("(norm != 0) & (grad_norm != 0)", "grad_norm != 0"),
        ("ratio = (ratio / rate_of(group)).clamp(max=1.0)", "ratio = ratio.clamp(max=1.0)"),
    ),
    ("optim/masters.py", ENGINE): (
        (" if original is None else original\n", "\n"),
        ("and value.shape == param.shape\n", ""),
    ),
    ("scaling/scaler.py", SCALING): (
        (
            "(state.scale * self.backoff_factor).clamp(min=self.floor)",
            "state.scale * self.backoff_factor",
        ),
        ("grows = tracker >= self.growth_interval", "grows = tracker > self.growth_interval"),
        ("torch.where(grows, 0, tracker)", "tracker"),
        ("late.is_due |= is_due", "late.is_due = is_due"),
        (
            "torch.maximum(own, found_inf.to(own.device, own.dtype), out=own)",
            "own.copy_(found_inf)",
        ),
        ("generation = self.rule, self.generation + 1", "generation = self.rule, self.generation"),
        ("        clamp_(self.scale, rule.floor, rule.max_scale)\n", ""),
        ("        if not done:\n", "        if True:\n"),
        ("isinstance(rule, DynamicScale) and not rule.bounds(value)", "False"),
        ("isinstance(rule, DynamicScale) and number >= rule.growth_interval", "False"),
        ("self._has_odd_count |= rule.growth_interval < old.growth_interval", "pass"),
        ("self._has_odd_scale |= rule.floor > old.floor or", "self._has_odd_scale |="),
        ("self._has_odd_scale = self._has_odd_count = True", "pass"),
        ("c_float(number).value for number", "number for number"),
        ("wide = loss if loss.dtype is torch.float64 else loss.float()", "wide = loss.float()"),
    ),
    ("casting/wrappers.py", CASTING): (
        (
            "tensor.dtype in CASTABLE and tensor.device.type == device_type",
            "tensor.device.type == device_type",
        ),
        ("return has_half and has_float32", "return has_half"),
    ),
    ("core/pytree.py", "core " + CASTING): (("kind(items, value.maxlen)", "kind(items)"),),
    ("casting/regions.py", CASTING): (
        ("if bracket.nesting == around and CASTS.disabled is None:", "if CASTS.disabled is None:"),
        ("    if CASTS.disabled is None:\n        if _is", "    if True:\n        if _is"),
    ),
    ("casting/thread_casts.py", CASTING): (
        ("            torch.clear_autocast_cache()\n", ""),
        ("        _drop_abandoned()\n", "        pass\n"),
    ),
    ("casting/autocast_state.py", CASTING): (
        (
            'return None if kwargs.get("out") is not None else found\n    for arg',
            "return found\n    for arg",
        ),
    ),
    ("casting/op_lists.py", "casting/test_expected_dtypes.py"): (
        ('"norm vector_norm"', '"norm"'),
        ('"torch", "softmax log_softmax"', '"torch", "log_softmax"'),
    ),
    ("report/skips.py", "report"): (("o.old_scale <= floor", "o.old_scale < floor"),),
    ("engine/block.py", ENGINE): (
        ("self._reaction = self._reaction or adjust", "self._reaction = adjust"),
        ("            steps += [self._end_ranks, self._follow_unreduced]\n", "            pass\n"),
        ('if self.reached == {"loss"} and any', "if False and any"),
    ),
    ("engine/clipping.py", ENGINE): (
        ("_EPS = 1e-6", "_EPS = 0.0"),
        ("(max_norm / (norm + _EPS)).clamp(max=1.0)", "max_norm / (norm + _EPS)"),
    ),
    ("engine/session.py", ENGINE): (
        ("self.skips_in_row + 1 if skipped else 0", "self.skips_in_row + int(skipped)"),
        ("self.found_inf = self.heard = None", "self.heard = None"),
        ("                table.absorb()\n", "                pass\n"),
        ("return bool(torch.isfinite(norm))", "return True"),
        ("return norm if is_same else None", "return norm"),
    ),
    ("optim/gradients.py", MASTERS): (
        ("if are_same and versions == self.versions and not looks:", "if are_same and not looks:"),
        ("        self.may_have_bases |= grad is not None\n", ""),
        ("            self.records = [_SPENT[record.is_plain]] * len(self._weights)\n", ""),
    ),
    ("optim/pairs.py", MASTERS): (
        ("        if changed or False in rounded:", "        if False in rounded:"),
        ("torch.where(rounded == half, wide, half.float())", "half.float()"),
        ("            self._are_alike = len(kinds) == 1\n", "            self._are_alike = True\n"),
    ),
    ("optim/table.py", "engine/test_shared_weights.py engine/test_doors.py"): (
        ("        other.gradients.note(twin.row, grad, None if grad is None else record)\n", ""),
        ("            other.loaded.add(twin.row)\n", "            pass\n"),
        ("        self.settle(twin.row)\n        record", "        record"),
    ),
    ("optim/rewritten.py", "optim/test_rewritten.py engine/test_grad_scaler.py"): (
        (" | (old.isnan() != new.isnan()).any()", ""),
        ("return None if row.is_emptied else row.factor(None)", "return row.factor(None)"),
        ("largest = torch.stack", "largest = 0 * torch.stack"),
    ),
    ("engine/optimizer_hooks.py", ENGINE): (
        ("self._stepping = self._withheld = False", "self._stepping = False"),
        ("                self._session.take_findings(session)\n", "                pass\n"),
        ("            self._begin()  # reached", "            pass  # reached"),
    ),
    ("compat/fp16_utils/half_params.py", "fp16_utils"): (
        ("if self._unscaled.pop(id(param), None) is param.grad:", "if False:"),
        ("self._scale in (None, scale)", "True"),
    ),
    ("optim/fused/keeping.py", "optim engine/test_fast_path.py engine/test_doors.py"): (
        (
            "if known is None or known[0] != ids or known[1] != list(map(id, state)):",
            "if not known:",
        ),
    ),
    ("kernels/stored.py", STORED): (
        ("low = torch.where((half == 0) & (low < 0), torch.zeros_like(low), low)", "pass"),
        ("exponent.clamp(min=113, max=142)", "exponent.clamp(max=142)"),
        ("found[start - 8 * first :][:count]", "found[:count]"),
        ("(zero + step) & _WORD", "zero"),
        ("code = code.clamp(max=(BINADES[kind] << MANTISSA) - 1)", "pass"),
        ("torch.where(word < lowest << 23, below, word)", "word"),
        ("torch.where(by.isfinite(), torch.where(room < 0, -value, value), torch.nan)", "value"),
        ("(w.abs() >= BEYOND_FLOAT16) & w.isfinite()", "w.abs() >= BEYOND_FLOAT16"),
    ),
    ("kernels/jit/formats.py", STORED): (
        ("low = builder.select(is_zero, _at_least(builder, low, _Int(0)), low)", "pass"),
        ("builder.add(half, builder.zext(is_half_way, _Short))", "half"),
        ("end -= end % layout.rows[tensor] % length", "pass"),
        ("            column = column if column < row else 0", "            pass"),
        ("return room + 2 * (start - 8 * first)", "return room"),
        ("code = _at_least(builder, code, builder.zext(is_above, _Int))", "pass"),
        ("if largest >= _INFINITY:", "if False:"),
    ),
    ("kernels/reference/stored.py", STORED): (
        (
            "(self.update.found_inf.to(target.device) != 0, target, value)",
            "(torch.tensor(0) != 0, target, value)",
        ),
        ("start=stored.starts[0]", "start=0"),
    ),
    ("optim/fused/keeping.py", STORED): (
        ('groups[home.number].get("step", 1) - 1', "0"),
        ("state.pop(key + SCALES, None)", "pass"),
        ("numbers=numbers", "numbers=[0] * len(numbers)"),
    ),
    ("optim/fused/moments.py", STORED): (
        ("start = box_of(leaf)[0][0] * math.prod(shape[1:])", "start = 0"),
        ("if given is kept and scales is not None:", "if False:"),
        ("            row=self.row,\n", "            row=0,\n"),
    ),
    ("engine/storage.py", STORED): (
        ("id(param) in updated and not kept.is_wide(param)", "not kept.is_wide(param)"),
        ("not kept.is_wide(param) and id(param) not in norms", "id(param) not in norms"),
        ("tuple(scales.shape) != wanted", "False"),
    ),
    ("optim/table.py", STORED): (
        ("self.note_written((row,))  # the load replaces", "pass  # the load replaces"),
        ("if not self.packs or self.compares:", "if not self.packs:"),
        ("self._written.add(self.twins[row])", "pass"),
        ("self._shares_versions |= max(writes, default=0) > 1", "pass"),
        ("increment_version(master)  # who saved it", "pass  # who saved it"),
        ("                self._make_row(row, held)\n", "                pass\n"),
        ("        twin.stays_wide = True\n        with torch", "        with torch"),
        ("if self.packs else value", "if False else value"),
        ("self._written.update([self.twins[row] for row in changed])", "pass"),
        ("self.twins[row].dtype = half.dtype  # another", "pass  # another"),
    ),
    ("optim/fused/entries.py", "optim engine/test_fast_path.py engine/test_doors.py"): (
        ("both = factor * inv_scale.to(factor.device)", "both = factor"),
        ("keys.append(list(map(id, entries.factors)))", "pass"),
    ),
}
